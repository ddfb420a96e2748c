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
from gptlite.config import Config, from_yaml, read_saved, to_dict, to_yaml
from gptlite.data.tokenizer import Tokenizer
from gptlite.errors import ConfigError
from gptlite.files import write_whole
from gptlite.trainer.state import TrainState, model_tensors


class RunFolder:
    """`<run.dir>`: config.yaml, metrics.jsonl, train.log, checkpoints/, result.json.

    Making one leaves nothing behind, and raises ConfigError where training here would mix two runs; nothing is
    written before `opened`. `resume_from` is the checkpoint that training starts from, or None.
    """

    def __init__(self, config: Config) -> None:
        self.path = Path(config.run.dir).expanduser()
        self.config = config
        self._early: list[str] = []  # lines said before there was a log
        self._log_file: TextIO | None = None
        self.tokenizer: Tokenizer | None = None
        self._refuse_unwritable()
        saved = self.path / "config.yaml"
        if saved.exists():
            self._refuse(read_saved(saved), f"run.dir={config.run.dir}")
        self.checkpointer = Checkpointer(config.checkpoint, self.path)
        self.resume_from = self.checkpointer.find(config.checkpoint.resume, self.log)
        if self.resume_from is not None:
            self._refuse(from_yaml(read_config(self.resume_from)), f"checkpoint {self.resume_from}")

    def restore(self, state: TrainState) -> None:
        """Loads the checkpoint there is into a state. Raises ConfigError if it read other data or is past the end."""
        if self.resume_from is None:
            return
        meta, weights_only = read_meta(self.resume_from), self.config.checkpoint.load == "weights"
        old, new = ({"data_identity": identity} for identity in (meta["data_identity"], state.data_identity))
        if refusal := compare_configs(old, new, self.config.checkpoint.load).refusal():
            raise ConfigError(f"checkpoint {self.resume_from}: {refusal}")
        steps = self.config.trainer.max_steps
        if not weights_only and meta["step"] > steps:
            raise ConfigError(
                f"trainer.max_steps={steps} is below step {meta['step']} of {self.resume_from}; "
                f"give {meta['step']} or more, or start anew in another run.dir"
            )
        tensors = model_tensors(state.parts) if weights_only else state.tensors()
        load_tensors(self.resume_from, tensors, strict=not weights_only, verified=True, log=self.log)
        if not weights_only:
            state.load_meta(meta)
            if not self.resume_from.resolve().is_relative_to(self.path.resolve()):
                state.wandb_id = None  # that tracker's run belongs to the folder it was started in
        for change in environment_changes(read_manifest(self.resume_from)):
            self.log(f"resuming elsewhere: {change}; the curve may differ from an uninterrupted run's by rounding")
        self.log(f"{'weights' if weights_only else 'resuming'} from {self.resume_from}")

    @contextmanager
    def opened(self, config: Config, tokenizer: Tokenizer) -> Iterator[None]:
        """The folder, made, logging, and locked against another process that trains in it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._log_file = (self.path / "train.log").open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"run.dir={config.run.dir} cannot be written: {error}; give another run.dir") from None
        with self._log_file:
            _lock(self._log_file, f"run.dir={config.run.dir}: another process trains in it; wait, or give another")
            self._log_file.writelines(line + "\n" for line in self._early)
            self.config, self.tokenizer = config, tokenizer
            yield

    def write_config(self) -> None:
        """config.yaml: what runs, resolved. An older one stays beside it, under a number."""
        target, text = self.path / "config.yaml", to_yaml(self.config)
        if target.exists() and (old := target.read_text(encoding="utf-8")) != text:
            number = 1
            while (kept := self.path / f"config.{number}.yaml").exists():
                number += 1
            write_whole(kept, old)
        write_whole(target, text)

    def log(self, text: str) -> None:
        """Lines for train.log, where there is none yet once there is, and for the terminal."""
        self.record(text)
        try:
            print(text, flush=True)
        except OSError:  # a pipe's reader has gone, as tee does at Ctrl-C: the run is worth more than its echo
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def record(self, text: str) -> None:
        """Lines for train.log alone."""
        if self._log_file is None:
            self._early.append(text)
        elif not self._log_file.closed:
            self._log_file.write(text + "\n")
            self._log_file.flush()

    def save(self, state: TrainState) -> Path:
        """Commits a checkpoint of the state and returns its folder."""
        return self.checkpointer.save(state.tensors(), state.meta(), to_yaml(self.config), self.tokenizer, self.log)

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


def _lock(file: TextIO, refusal: str) -> None:
    """Holds a file until this process ends. Where the file system has no locks, nothing is held."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(refusal) from None
    except (ImportError, OSError):
        pass
