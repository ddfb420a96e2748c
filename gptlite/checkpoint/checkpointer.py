"""Checkpoints of one run: saving, retaining the newest, and finding the one to resume from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from gptlite.checkpoint import dcp, store
from gptlite.checkpoint.background import Background
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.find import beyond, candidates, damage, first_intact, newest_intact, passing_over
from gptlite.checkpoint.load import verify_together
from gptlite.checkpoint.manifest import DamagedCheckpoint, Entries, read_manifest, write_manifest
from gptlite.checkpoint.parts import Parts
from gptlite.checkpoint.space import disk_bytes
from gptlite.errors import ConfigError, system_error
from gptlite.parallelism.layout import ONE_RANK
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import ALONE, from_all, from_main, together
from gptlite.progress import Log


class SavesItself(Protocol):
    """Interface that checkpoints require of a tokenizer."""

    @property
    def saved_bytes(self) -> list[int]:
        """Sizes of the files that `save` writes, in bytes."""
        ...

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files into an existing folder."""


class Checkpointer:
    """Reader and writer of `<run_dir>/checkpoints`. Construction does not access the disk.

    All ranks of `mesh` construct it and call `save`, `finish`, `size`, `find` and `close` together. `layout` is the
    description of the mesh for the manifest.
    """

    def __init__(self, config: CheckpointConfig, run_dir: Path, mesh: Mesh = ALONE, layout: str = ONE_RANK):
        self.config, self.mesh, self.layout = config, mesh, layout
        self.root = Path(run_dir) / "checkpoints"
        self.save_seconds = 0.0  # duration of the longest save so far, from its start to its commit
        self._pending: Background | None = None
        self._buffers: dict[str, Tensor] = {}
        # A CPU group with its own timeout, since some ranks write for longer than others.
        self._group: dist.ProcessGroup | None = None
        if mesh.world_size > 1:
            limit = timedelta(seconds=config.timeout_seconds)
            self._group = dist.new_group(backend="gloo", timeout=limit)  # type: ignore[assignment]

    def save(
        self,
        tensors: Mapping[str, Tensor],
        meta: dict[str, Any],
        config_yaml: str,
        tokenizer: SavesItself | None,
        log: Log,
        beside: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Commit a checkpoint of step `meta["step"]`, then remove older ones beyond `keep`. Returns its folder.

        `tensors` is keyed by global names; a tied weight appears once. Each rank passes the tensors of which it holds
        all or a shard. `meta` must be serializable as JSON; `beside` has more small files, as `{path in the folder:
        content}`. If an intact checkpoint of that step exists, nothing is written. Until the final rename, all files
        are in a folder with a hidden name, so a failure leaves the existing checkpoints unchanged.

        Rank 0 creates and renames the folder, and writes everything except tensors. An exception on one rank is raised
        on all: OSError (e.g. a full disk), TypeError (`meta` is not JSON).

        With `async_save`, the call returns once the tensors are copied, and a thread does the rest. Only one save runs
        at a time, so the call first waits for the previous save. An exception in the thread is raised by `finish` or
        the next `save`.
        """
        self.finish()
        began = time.monotonic()
        parts = self._shared(tensors)
        final = self.root / store.step_name(meta["step"])
        texts = {"config.yaml": config_yaml.encode(), **(beside or {})}
        size = partial(disk_bytes, parts, meta, _sizes(texts, tokenizer))

        def complete(folder: Path, files: Entries) -> None:
            """Write all files except the tensors, which are already written. The manifest is written last."""
            for name, content in texts.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
            if tokenizer is not None:
                (folder / "tokenizer").mkdir()
                tokenizer.save(folder / "tokenizer")
            write_manifest(folder, parts.described, files, meta, self.layout)

        write = partial(self._write, final, parts, size, complete, log, began)
        if not self.config.async_save:
            write(None)  # ranks wait at the process group's store, without a time limit
            return final
        parts.stage(self._buffers)
        group, limit = self._group, self.config.timeout_seconds
        yielding = self.mesh.device.type == "cpu"
        # A thread, not a process: hashing, copying and writing release the GIL.
        self._pending = Background(lambda: write(group), f"checkpoint {final}", limit, yielding=yielding)
        return final

    @property
    def failed(self) -> bool:
        """True if the save in progress has failed or timed out, so that `finish` raises. May differ between ranks."""
        return self._pending is not None and self._pending.failed

    def finish(self) -> None:
        """Wait for the save in progress, if any, and raise its exception. Raises TimeoutError if it takes too long."""
        pending, self._pending = self._pending, None  # cleared first, so that a failure is raised only once
        if pending is not None:
            try:
                pending.result()
            finally:
                if pending.running:  # timeout or Ctrl-C
                    self._group = None  # must not be destroyed while the thread still uses it

    def close(self, log: Log = print) -> None:
        """Wait for the save in progress and log its failure. Releases the process group; no save may follow."""
        try:
            self.finish()
        except BaseException as error:
            log(f"checkpoint: the last save failed: {type(error).__name__}: {error}")
            if not isinstance(error, Exception):  # Ctrl-C
                raise
        finally:
            self._buffers.clear()
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None

    def size(
        self, tensors: Mapping[str, Tensor], meta: dict[str, Any], config_yaml: str, tokenizer: SavesItself | None
    ) -> int:
        """Return an upper bound of the bytes on disk of the checkpoint that `save` would write on all ranks."""
        parts, small = self._shared(tensors), _sizes({"config.yaml": config_yaml.encode()}, tokenizer)
        return from_main(self.mesh, lambda: disk_bytes(parts, meta, small))

    def find(self, resume: str, log: Log = print) -> Path | None:
        """Return the verified step folder to start from, or None for a fresh start. Logs the reason for each rejection.

        Rank 0 searches, and every rank hashes a share of the files.

        `resume`: auto (this run's newest intact checkpoint), never, or the path of a step, checkpoints or run folder.
        Raises ConfigError if a path holds no intact checkpoint, if all of this run's checkpoints are damaged (starting
        over is the user's decision), or if the run folder already has checkpoints of steps that the run would reach.
        """
        held = from_main(self.mesh, lambda: store.step_folders(self.root))
        check = partial(verify_together, log=log, mesh=self.mesh)
        if resume == "auto" and self.config.load == "all":
            fix = "move the checkpoints away to start over, or set checkpoint.resume to another path"
            return newest_intact(held, str(self.root), fix, log, check) if held else None
        checkpoint = None
        if resume not in ("auto", "never"):
            key = "checkpoint.resume"
            choice = from_main(self.mesh, lambda: candidates(resume, key, keywords=("auto", "never")))
            checkpoint = first_intact(choice, resume, key, log, check)
        from_main(self.mesh, lambda: self._refuse_running_into(held, checkpoint, resume))
        return checkpoint

    def rewind(self, position: int, start: Path | None, log: Log = print) -> Path | None:
        """Return the newest intact checkpoint with `consumed_samples` of at most `position`, or None if there is none.

        The candidates are this run's checkpoints and `start`, from which the run began. Later checkpoints of this run
        are renamed, so that no run resumes from them.
        """
        self.finish()
        held = from_main(self.mesh, lambda: store.step_folders(self.root))
        known = [*held, *([start] if start else [])]
        good = from_main(self.mesh, lambda: [folder for folder in known if _samples(folder) <= position])
        checkpoint, _ = passing_over(good, log, partial(verify_together, log=log, mesh=self.mesh))
        if checkpoint is None:
            return None

        def leave_later() -> None:
            later = held[: held.index(checkpoint)] if checkpoint in held else held  # newest first
            for folder in later:
                aside = store.set_aside(folder, "superseded")
                log(f"checkpoint: renamed {folder.name} to {aside.name}: it was saved after the first sample to skip")
            if later and checkpoint in held:
                store.point_latest(checkpoint)

        from_main(self.mesh, leave_later)
        return checkpoint

    def _refuse_running_into(self, held: list[Path], checkpoint: Path | None, resume: str) -> None:
        start = read_manifest(checkpoint).meta["step"] if checkpoint and self.config.load == "all" else 0
        # A step 0 contains imported weights, which a fresh start would ignore.
        # The step of the checkpoint that was found is no conflict, since it is not saved again.
        if held and (store.step_of(held[0]) or 0) >= start + (checkpoint is not None):
            key = f"checkpoint.load={self.config.load}" if resume == "auto" else f"checkpoint.resume={resume}"
            fix = "use another run.dir, or checkpoint.resume=auto checkpoint.load=all to continue from there"
            if store.step_of(held[0]) == 0:
                fix = f"use another run.dir, with checkpoint.resume={self.root.parent} checkpoint.load=weights"
            raise ConfigError(f"{key} starts from step {start}, but {self.root} already holds {held[0].name}; {fix}")

    def _shared(self, tensors: Mapping[str, Tensor]) -> Parts:
        """Return this rank's parts, with the boxes that it writes. Raises TypeError on all ranks for a non-tensor."""
        parts = together(self.mesh, lambda: Parts(tensors))
        parts.share(from_all(self.mesh, lambda: parts.offered), self.mesh.rank)
        return parts

    def _write(
        self,
        final: Path,
        parts: Parts,
        size: Callable[[], int],
        complete: Callable[[Path, Entries], None],
        log: Log,
        began: float,
        agree: dist.ProcessGroup | None,
    ) -> None:
        """Write, complete and commit a checkpoint. In a thread, ranks synchronize over `agree`, else over the process
        group's store."""
        mesh = self.mesh
        with ExitStack() as lock, ExitStack() as staging:  # used by rank 0; empty on other ranks
            folder = from_main(mesh, lambda: self._begin(final, size, lock, staging, log), agree)
            if folder is not None:
                files = dcp.write(folder, parts, log, mesh, self._group, agree)

                def commit() -> None:
                    complete(folder, files)
                    staging.close()  # commits by renaming the folder

                from_main(mesh, commit, agree)
                self.save_seconds = max(self.save_seconds, seconds := time.monotonic() - began)
                rate = parts.total_bytes / max(seconds, 1e-9) / 1e6
                if mesh.is_main:
                    log(f"saved {final.name}: {parts.total_bytes / 1e6:.1f} MB in {seconds:.2f} s, {rate:.0f} MB/s")
            from_main(mesh, lambda: store.point_latest(final), agree)
            self._retain(final, log, agree)

    def _begin(
        self, final: Path, size: Callable[[], int], lock: ExitStack, staging: ExitStack, log: Log
    ) -> Path | None:
        """Return the folder to write in, with a subfolder for tensors, or None if the step exists and is intact."""
        lock.enter_context(store.writing(self.root, log))
        if not _make_way(final, log):
            return None
        store.check_space(self.root, size())
        folder = staging.enter_context(store.staged(final))
        (folder / "data").mkdir()
        return folder

    def _retain(self, saved: Path, log: Log, agree: dist.ProcessGroup | None) -> None:
        """Remove checkpoints beyond the configured number, once the newest one has been read back and verified."""
        keep, every = self.config.keep, self.config.keep_every
        going = from_main(self.mesh, lambda: beyond(self.root, saved, keep, every, log), agree)
        if not going:
            return
        try:
            verify_together(saved, log, self.mesh, agree)  # all hashes, since older checkpoints are then deleted
        except DamagedCheckpoint as error:
            log(f"checkpoint: {saved.name} failed verification: {error.reason}; older checkpoints are kept")
        else:
            from_main(self.mesh, lambda: _remove(going, log), agree)


def _sizes(texts: Mapping[str, bytes], tokenizer: SavesItself | None) -> list[int]:
    return [*map(len, texts.values()), *(tokenizer.saved_bytes if tokenizer else [])]


def _remove(folders: list[Path], log: Log) -> None:
    """Delete checkpoints. One that cannot be deleted is logged: training goes on."""
    for folder in folders:
        try:
            store.remove(folder)
        except OSError as error:
            log(f"checkpoint: {system_error(error)}")


def _samples(folder: Path) -> int:
    """Return the number of samples consumed before a checkpoint was saved; 0 if its manifest is damaged, as the
    verification that follows rejects it."""
    try:
        return read_manifest(folder).meta["consumed_samples"]
    except DamagedCheckpoint:
        return 0


def _make_way(final: Path, log: Log) -> bool:
    """Return True if a step has no intact folder, so that it must be written.

    A damaged folder is renamed, not deleted.
    """
    if not final.exists():
        return True
    if reason := damage(final, log, hashes=True):
        log(f"checkpoint: moving {final} to {store.set_aside(final, 'damaged').name}: {reason}")
    return bool(reason)
