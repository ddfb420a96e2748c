"""Run folder: the check that a command may train in it, its log and its checkpoints."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from gptlite import limits
from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.compare import compare_configs
from gptlite.checkpoint.load import load_tensors, read_config
from gptlite.checkpoint.manifest import environment_changes, read_manifest
from gptlite.checkpoint.store import step_folders
from gptlite.config.completed import too_few_ids
from gptlite.config.saved import from_yaml, read_saved, to_dict, to_yaml
from gptlite.config.schema import Config
from gptlite.data.order_log import OrderRow, note_order, note_spike
from gptlite.data.registry import kind_of
from gptlite.documents import read_text
from gptlite.errors import ConfigError, RunEnded, printable, system_error
from gptlite.files import existing, open_inside, open_regular, try_lock, unwritable, write_whole
from gptlite.models.capabilities import BatchNorms, capability
from gptlite.models.registry import spec_of
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.messages import passed_on
from gptlite.parallelism.rank_sync import from_all, from_main
from gptlite.progress import Console, Log, counted
from gptlite.tokenizers.base import Tokenizer
from gptlite.trainer.result import RESULT
from gptlite.trainer.spike import Spike
from gptlite.trainer.state import TrainState, model_tensors

LOG = "train.log"
OWNER = ".owner"
# Files and folders of a run that are not replaced as a whole.
WRITTEN = (
    LOG,
    "metrics.jsonl",
    "metrics.replaced.jsonl",
    "data_order.jsonl",
    "checkpoints",
    "ranks",
    "tensorboard",
    "wandb",
)
# Time in which other ranks must see a file that rank 0 has created. Network file systems cache the absence of a file.
APPEARS_SECONDS = 30.0


@passed_on
class SaveFailed(RunEnded):
    """Raised when a checkpoint could not be written. Earlier checkpoints are unchanged."""


class RunFolder:
    """Folder `<run.dir>`, with config.yaml, data_order.jsonl, metrics.jsonl, train.log, checkpoints/, result.json.

    The constructor raises ConfigError if training in the folder would mix two runs. Nothing is written before `opened`.
    `resume_from` is the checkpoint from which training starts, or None.

    All ranks construct it, and call `restore`, `opened`, `write_config` and `save` together. Rank 0 makes decisions and
    writes files; its errors are raised on all ranks. Other ranks only print their log lines and write their tensors.
    """

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.path = Path(config.run.dir).expanduser()
        self.config, self.mesh = config, mesh
        self._early: list[str] = []  # lines logged before train.log was opened
        self._notices: dict[str, Log] = {}  # differences from the checkpoint, logged once it is accepted
        self._log_file: IO[str] | None = None
        self._console = Console()
        self.tokenizer: Tokenizer | None = None
        self.layout = mesh.layout.describe(config.parallelism)
        self.checkpointer = Checkpointer(config.checkpoint, self.path, mesh, self.layout)
        from_main(mesh, self._refuse_folder)
        self.resume_from = self.checkpointer.find(config.checkpoint.resume, self.log)
        self._saved: Config | None = None  # that of the checkpoint, on rank 0
        if self.resume_from is not None:
            from_main(mesh, self._refuse_checkpoint)

    def restore(self, state: TrainState) -> None:
        """Load the checkpoint, if any, into `state`.

        Raises ConfigError if the checkpoint is of other data, or of a step after the run's last step.
        """
        if self.resume_from is None:
            return
        meta, changes = from_main(self.mesh, lambda: self._accepted(state))
        for notice, log in self._notices.items():
            log(notice)
        weights_only = self.config.checkpoint.load == "weights"
        if weights_only:
            tensors = model_tensors(state.model, state.parts)
            load_tensors(self.resume_from, tensors, strict=False, verified=True, log=self.log, mesh=self.mesh)
            notes = state.take(tensors)
        else:
            notes = [*state.load(self.resume_from, self.log), *state.load_meta(meta)]
        for line in notes:
            self.log(line)
        if not weights_only and not self.resume_from.resolve().is_relative_to(self.path.resolve()):
            state.wandb_id = None  # the tracker's run belongs to the folder in which it began
        batch = ", and by more if data.micro_batch_size x data-parallel ranks changes, over which batch norm averages"
        norms = capability(state.model.spec, BatchNorms)
        averaged = norms is not None and any(map(norms.has_batch_norm, state.parts))
        rounding = f"by rounding{batch if averaged else ''}"
        for change in [] if weights_only else changes:  # with weights only, there is no loss curve to continue
            words = f"losses may differ from those of an uninterrupted run {rounding}"
            self.log(f"resuming with a change: {change}; {words}")
        self.log(f"{'weights' if weights_only else 'resuming'} from {self.resume_from}")

    def complete(self, state: TrainState) -> bool:
        """Return True if this folder's run has taken and evaluated its last step; log how to train further."""
        trainer, found = self.config.trainer, self.resume_from
        if found is None or not found.resolve().is_relative_to(self.path.resolve()):
            return False
        if state.clock < trainer.last_step or state.evaluated_step != state.step:
            return False
        part = state.clock < trainer.max_steps
        words = f"already at trainer.stop_step={trainer.stop_step}" if part else "already complete"
        further = "trainer.stop_step=null" if part else trainer.doubled
        self.log(
            f"{words}: step {state.step} of {state.steps_until(trainer.max_steps)}; to train further give {further}"
        )
        return True

    @contextmanager
    def opened(self, config: Config, tokenizer: Tokenizer | None) -> Iterator[None]:
        """Create the folder, open the log, and lock the folder for the block: no other process can train in it."""
        with ExitStack() as held:
            held.callback(self.checkpointer.close, self.log)
            from_main(self.mesh, lambda: self._open_log(config, held))
            from_all(self.mesh, self._refuse_unseen)
            self.config, self.tokenizer = config, tokenizer
            yield

    def write_config(self) -> None:
        """Write the resolved configuration to config.yaml. A differing older file is kept as config.N.yaml."""
        from_main(self.mesh, self._write_config)

    def write_order(self, state: TrainState) -> None:
        """Record in data_order.jsonl the rules that select this run's samples from now on."""
        loader = state.loader
        rows = OrderRow.of(loader.schedule, loader.stream.eras, state.step, state.consumed_samples)
        if damage := from_main(self.mesh, lambda: next(filter(None, [note_order(self.path, row) for row in rows]), "")):
            self.log(f"{damage}; the run goes on, and its earlier rows stay as they are")

    def log(self, text: str) -> None:
        """Write lines to the terminal and to train.log, which also receives earlier lines when it is opened."""
        self.record(text)
        try:
            self._console.print(printable(text, "\n"))
        except OSError:  # the reader of a pipe has exited, e.g. tee at Ctrl-C: continue without it
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def error(self, text: str) -> None:
        """Write a line to train.log and to standard error."""
        self.record(text)
        print(printable(text, "\n"), file=sys.stderr, flush=True)

    def record(self, text: str) -> None:
        """Write lines to train.log only."""
        if not self.mesh.is_main:
            return
        text = printable(text, "\n\t")
        if self._log_file is None:
            self._early.append(text)
        elif not self._log_file.closed:
            with suppress(OSError):  # e.g. a full disk: the terminal has the line, and the next save fails
                self._log_file.write(text + "\n")
                self._log_file.flush()

    def check_space(self, state: TrainState, tokenizer: Tokenizer | None) -> None:
        """Raise ConfigError if there is no space for one checkpoint; log a warning if checkpoint.keep needs more."""
        size = self.checkpointer.size(state.tensors(), state.meta(), to_yaml(self.config), tokenizer)
        keep = self.config.checkpoint.keep
        free = from_main(self.mesh, lambda: shutil.disk_usage(existing(self.path)).free)
        takes = f"a checkpoint takes {size / 1e6:.1f} MB, but only {free / 1e6:.1f} MB are free"
        message = f"run.dir={self.config.run.dir}: {takes}"
        if free < size:
            raise ConfigError(f"{message}; free some, or give another run.dir")
        held = len(step_folders(self.path / "checkpoints")) if self.mesh.is_main else 0
        if self.mesh.is_main and free < (needed := max(1, keep + 1 - held)) * size:
            wanted = counted(needed, "checkpoint")
            self.log(f"warning: {message}: too little for the {wanted} that checkpoint.keep={keep} needs")

    def save(self, state: TrainState) -> Path:
        """Save a checkpoint of the state, or start an asynchronous save. Return its folder. Raises SaveFailed."""
        state.settle()
        with self._failing_in_words(f"the checkpoint of step {state.step}"):
            return self.checkpointer.save(state.tensors(), state.meta(), to_yaml(self.config), self.tokenizer, self.log)

    def rewind(self, state: TrainState, spike: Spike) -> Path | None:
        """Load the newest intact checkpoint from before the spike's samples, and make the state skip these samples.

        Returns the checkpoint; None if there is none. Later checkpoints are renamed. Raises SaveFailed if the save in
        progress failed.
        """
        self.finish_saves()
        start = self.resume_from if self.config.checkpoint.load == "all" else None
        checkpoint = self.checkpointer.rewind(spike.first, start, self.log)
        if checkpoint is None:
            return None
        tracker, skipped = state.wandb_id, state.loader.schedule.skipped
        state.load(checkpoint, self.log)
        state.load_meta(from_main(self.mesh, lambda: read_manifest(checkpoint).meta))
        # Keep values that the checkpoint may lack: the tracker's run, and the ranges skipped since it was saved.
        state.wandb_id, samples = tracker, (spike.first, spike.stop)
        state.loader.schedule = state.loader.schedule.skipping([*skipped, samples])
        from_main(self.mesh, lambda: note_spike(self.path, state.step, spike.step, samples))
        self.write_order(state)
        return checkpoint

    def finish_saves(self) -> None:
        """Wait for the save in progress. Raises SaveFailed if it failed."""
        with self._failing_in_words("a checkpoint"):
            self.checkpointer.finish()

    @property
    def save_failed(self) -> bool:
        """True if the save in progress has failed on this rank."""
        return self.checkpointer.failed

    @property
    def save_seconds(self) -> float:
        """Duration of the longest save, from its start to its commit."""
        return self.checkpointer.save_seconds

    @contextmanager
    def _failing_in_words(self, what: str) -> Iterator[None]:
        """Convert an OSError to SaveFailed, with one line on the error and the newest existing checkpoint."""
        try:
            yield
        except OSError as error:
            held = step_folders(self.checkpointer.root)
            left = f"the last one, {held[0]}, is intact" if held else "there is no earlier one"
            raise SaveFailed(
                f"{what} was not saved: {system_error(error)}; {left}; fix the problem, and run the same command again"
            ) from error

    def write_result(self, result: dict[str, Any]) -> None:
        """Write result.json, for scripts and sweeps. Rank 0 does not wait for other ranks, which may have exited."""
        if self.mesh.is_main:
            write_whole(self.path / RESULT, json.dumps(result, indent=2) + "\n")

    def _refuse_folder(self) -> None:
        """Raise ConfigError for a folder that is unwritable, is in use, contains another run, or is inside a run."""
        for folder in (self.path, *self.path.parents):
            if folder.name == "checkpoints" and (run := folder.parent) != folder and (run / "config.yaml").exists():
                raise ConfigError(
                    f"run.dir={self.config.run.dir} is inside another run; give run.dir={run} to resume it"
                )
        saved = self.path / "config.yaml"
        if not saved.exists() and (runs := sorted(self.path.glob("*/config.yaml"))):
            raise ConfigError(
                f"run.dir={self.config.run.dir} is a folder of runs; give one of them to resume it, e.g. "
                f"run.dir={runs[-1].parent}, or a new folder"
            )
        for name in WRITTEN:
            if (path := self.path / name).is_symlink():
                raise ConfigError(
                    f"run.dir={self.config.run.dir}: {path} is a symbolic link, and a run writes only in its folder; "
                    "remove the link, or make run.dir itself one"
                )
        if reason := unwritable(self.path, "run.dir"):
            raise ConfigError(f"run.dir={self.config.run.dir}: {reason}")
        self._refuse_busy()
        if saved.exists():
            self._refuse(read_saved(saved), f"run.dir={self.config.run.dir}")

    def _refuse_checkpoint(self) -> None:
        """Raise ConfigError if the checkpoint is of another run."""
        assert self.resume_from is not None
        self._saved = from_yaml(read_config(self.resume_from), self.resume_from)
        self._refuse(self._saved, f"checkpoint {self.resume_from}")

    def _accepted(self, state: TrainState) -> tuple[dict[str, Any], list[str]]:
        """Return the checkpoint's `meta`, and the changes of the environment since it was written. Raises ConfigError
        if the checkpoint does not fit this state."""
        assert self.resume_from is not None
        assert self._saved is not None
        manifest, load = read_manifest(self.resume_from), self.config.checkpoint.load
        old, new = ({"data_identity": each} for each in (manifest.meta["data_identity"], state.data_identity))
        if refusal := compare_configs(old, new, load).refusal(load):
            path = getattr(self.config.data, "path", None)
            cause = kind_of(self.config.data).why_changed(self.config.data)
            where = f"checkpoint {self.resume_from}{f', data.path={path}' if path else ''}"
            raise ConfigError(f"{where}: {refusal}{cause}")
        size, was = (spec_of(each).vocab_size(each) for each in (state.model.config, self._saved.model))
        if was is not None and size is not None and was < size:
            raise ConfigError(too_few_ids(str(self.resume_from), was, size))
        if was not in (None, size):
            raise ConfigError(f"checkpoint {self.resume_from}: model.vocab_size={size} (was {was}); give {was}")
        trainer = self.config.trainer
        step, steps = manifest.meta["step"], trainer.last_step
        if load == "all" and step > steps:
            setting, least = f"{'max_steps' if steps == trainer.max_steps else 'stop_step'}={steps}", f"{step} or more"
            if trainer.max_epochs is not None and steps == trainer.max_steps:
                setting, least = f"max_epochs={trainer.max_epochs:g} ({counted(steps, 'step')})", "more"
            raise ConfigError(
                f"trainer.{setting} is below step {step} of {self.resume_from}; "
                f"give {least}, or start over in another run.dir"
            )
        return manifest.meta, environment_changes(manifest, self.layout)

    def _open_log(self, config: Config, held: ExitStack) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._log_file = open_inside(self.path, self.path / LOG, "a", encoding="utf-8")
            held.callback(self._close_log)
        except OSError as error:
            raise ConfigError(
                f"run.dir={config.run.dir} cannot be written: {system_error(error, 'give another run.dir')}"
            ) from None
        self._lock(held)
        self._log_file.writelines(line + "\n" for line in self._early)

    def _close_log(self) -> None:
        assert self._log_file is not None
        with suppress(OSError):  # the disk may still be too full for buffered lines
            self._log_file.close()

    def _lock(self, held: ExitStack) -> None:
        """Lock the log until this process ends, and write the process id to a note. Without file locks, do neither.

        However the process ends, the kernel releases the lock. The note may be left behind.
        """
        assert self._log_file is not None
        note = self.path / OWNER
        if not self._try_lock(self._log_file):
            return
        write_whole(note, f"process {os.getpid()} on {platform.node()}\n")
        held.callback(note.unlink, missing_ok=True)

    def _try_lock(self, file: IO[str]) -> bool:
        """Return True if the lock was taken, False if locks are not supported. Raises ConfigError if another process
        holds the lock."""
        locked = try_lock(file)
        if locked is False:
            owner = "another process"
            with suppress(OSError), open_regular(self.path / OWNER, "r", encoding="utf-8") as note:
                owner = note.read().strip()
            where = f"run.dir={self.config.run.dir}"
            raise ConfigError(f"{where}: {owner} is training in it; wait, stop it, or give another run.dir")
        return bool(locked)

    def _refuse_busy(self) -> None:
        """Raise ConfigError if another process trains in the folder. Called before the checkpoints are read, since that
        process may delete them."""
        with suppress(OSError), open_inside(self.path, self.path / LOG, "r+", encoding="utf-8") as log:
            self._try_lock(log)

    def _write_config(self) -> None:
        target, text = self.path / "config.yaml", to_yaml(self.config)
        if target.exists() and (old := read_text(target, limits.YAML_BYTES)) != text:
            number = 1
            while (kept := self.path / f"config.{number}.yaml").exists():
                number += 1
            write_whole(kept, old)
        write_whole(target, text)

    def _refuse_unseen(self) -> None:
        """Raise ConfigError if this rank cannot see the files that rank 0 has created."""
        until = time.monotonic() + APPEARS_SECONDS
        while not (self.path / LOG).exists():
            if time.monotonic() > until:
                raise ConfigError(
                    f"run.dir={self.config.run.dir}: rank {self.mesh.rank} on {platform.node()} cannot see the "
                    "files of rank 0 there; give an absolute path on a file system that all machines share"
                )
            time.sleep(0.1)

    def _refuse(self, old: Config, where: str) -> None:
        """Raise ConfigError if the model, the data or the seed differs from that in `old`; note other differences."""
        new = self.config
        spec, known = spec_of(new.model), spec_of(old.model).vocab_size(old.model)
        if known is not None:  # replaces a size left open; tokenizers are compared later
            new = replace(new, model=spec.with_vocabulary(new.model, known))
        if new.trainer.max_epochs is not None:  # max_steps is computed from it once the data is open
            new = replace(new, trainer=replace(new.trainer, max_steps=old.trainer.max_steps))
        differences = compare_configs(to_dict(old), to_dict(new), self.config.checkpoint.load)
        if refusal := differences.refusal(self.config.checkpoint.load):
            raise ConfigError(f"{where}: {refusal}")
        # Without duplicates, as config.yaml and the checkpoint may give the same notice.
        self._notices |= dict.fromkeys(filter(None, (differences.notice(), differences.resharding())), self.log)
        self._notices |= dict.fromkeys(filter(None, [differences.harmless()]), self.record)
