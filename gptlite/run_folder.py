"""A run's folder: whether a new command may go on in it, its log, its checkpoints."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.compare import compare_configs
from gptlite.checkpoint.load import load_tensors, read_config, read_meta
from gptlite.checkpoint.manifest import environment_changes, read_manifest
from gptlite.config import Config, from_yaml, to_dict, to_yaml
from gptlite.data.tokenizer import Tokenizer
from gptlite.errors import ConfigError
from gptlite.trainer.state import TrainState, model_tensors


class RunFolder:
    """`<run.dir>`: config.yaml, metrics.jsonl, train.log, checkpoints/, result.json.

    Making one only reads, and raises ConfigError where training here would mix two runs; nothing is written
    before `opened`. `resume_from` is the checkpoint that training starts from, or None.
    """

    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.dir).expanduser()
        self.config = config
        self._early: list[str] = []  # lines said before there was a log
        self._log_file: TextIO | None = None
        self._text = ""
        self.tokenizer: Tokenizer | None = None
        self._refuse_unwritable()
        saved = self.path / "config.yaml"
        if saved.exists():
            self._refuse(from_yaml(saved.read_text(encoding="utf-8")), f"run.dir={config.run.dir}")
        self.checkpointer = Checkpointer(config.checkpoint, self.path)
        self.resume_from = self.checkpointer.find(config.checkpoint.resume, self.log)
        if self.resume_from is not None:
            self._refuse(from_yaml(read_config(self.resume_from)), f"checkpoint {self.resume_from}")

    def restore(self, state: TrainState) -> None:
        """Loads the checkpoint there is into a state. Raises ConfigError if it read other data."""
        if self.resume_from is None:
            return
        meta, weights_only = read_meta(self.resume_from), self.config.checkpoint.load == "weights"
        old, new = ({"data_identity": identity} for identity in (meta["data_identity"], state.data_identity))
        if refusal := compare_configs(old, new, self.config.checkpoint.load).refusal():
            raise ConfigError(f"checkpoint {self.resume_from}: {refusal}")
        tensors = model_tensors(state.parts) if weights_only else state.tensors()
        load_tensors(self.resume_from, tensors, strict=not weights_only, log=self.log)
        if not weights_only:
            state.load_meta(meta)
        for change in environment_changes(read_manifest(self.resume_from)):
            self.log(f"resuming elsewhere: {change}; the curve may differ from an uninterrupted run's by rounding")
        self.log(f"{'weights' if weights_only else 'resuming'} from {self.resume_from}")

    @contextmanager
    def opened(self, config: Config, tokenizer: Tokenizer) -> Iterator[None]:
        """The folder, made and logging. An older configuration stays beside the new one, under a number."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._log_file = (self.path / "train.log").open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"run.dir={config.run.dir} cannot be written: {error}; give another run.dir") from None
        self._log_file.writelines(line + "\n" for line in self._early)
        self._text, self.tokenizer = to_yaml(config), tokenizer
        target = self.path / "config.yaml"
        if target.exists() and target.read_text(encoding="utf-8") != self._text:
            target.rename(self.path / f"config.{len(list(self.path.glob('config.*.yaml'))) + 1}.yaml")
        write_whole(target, self._text)
        try:
            yield
        finally:
            self._log_file.close()

    def log(self, text: str) -> None:
        """Lines for the terminal and train.log, where there is no log yet once there is."""
        print(text, flush=True)
        if self._log_file is None:
            self._early.append(text)
        elif not self._log_file.closed:
            self._log_file.write(text + "\n")
            self._log_file.flush()

    def save(self, state: TrainState) -> Path:
        """Commits a checkpoint of the state and returns its folder."""
        return self.checkpointer.save(state.tensors(), state.meta(), self._text, self.tokenizer, self.log)

    def write_result(self, result: dict[str, Any]) -> None:
        """result.json: how the run ended, for scripts and sweeps."""
        write_whole(self.path / "result.json", json.dumps(result, indent=2) + "\n")

    def _refuse_unwritable(self) -> None:
        folder = self.path
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if not folder.is_dir():
            raise ConfigError(f"run.dir={self.config.run.dir}: {folder} is a file; give a folder")
        try:
            # Permission bits do not tell: not for root, a full quota or a read-only mount. The file has no name.
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            reason = (error.strerror or "cannot be written").lower()
            raise ConfigError(f"run.dir={self.config.run.dir}: {folder}: {reason}; give another run.dir") from None

    def _refuse(self, old: Config, where: str) -> None:
        """Refuses to go on from another model, data or seed; notes what else differs."""
        new = self.config
        if new.model.vocab_size is None:  # the tokenizer's; that it is the same is seen once there is one
            new = replace(new, model=replace(new.model, vocab_size=old.model.vocab_size))
        differences = compare_configs(to_dict(old), to_dict(new), self.config.checkpoint.load)
        if refusal := differences.refusal():
            raise ConfigError(f"{where}: {refusal}")
        notice = differences.notice()
        if notice and notice not in self._early:  # the folder and its checkpoint may both say it
            self.log(notice)


def write_whole(path: Path, text: str) -> None:
    """Writes a text file so that it is either the old one or the whole new one."""
    partial = path.with_name(f".{path.name}.tmp")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
