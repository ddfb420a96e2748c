"""Checkpoints in host memory: each rank's parts in its shelf, and copies of them with partners on other nodes."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gptlite.checkpoint.background import Background
from gptlite.checkpoint.manifest import read_manifest
from gptlite.checkpoint.parts import Parts
from gptlite.config.saved import to_dict, to_yaml
from gptlite.config.schema import Config
from gptlite.cpu import memory_bytes
from gptlite.errors import ConfigError
from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.collectives import all_reduce
from gptlite.parallelism.in_files import read_once
from gptlite.parallelism.rank_sync import from_all, from_main
from gptlite.parallelism.reduction import PREFIX
from gptlite.progress import Log, counted, format_bytes
from gptlite.satellites.elastic.agree import agree, named
from gptlite.satellites.elastic.copies import Copies, Gate, Stopped
from gptlite.satellites.elastic.exchange import Held, fill
from gptlite.satellites.elastic.parts import (
    ALIGN,
    PAGE,
    ROW,
    Box,
    File,
    Name,
    header_bytes,
    record_length,
    rounded,
    seal,
)
from gptlite.satellites.elastic.shelf import COPIES, Shelf, node_names
from gptlite.trainer.build import Run
from gptlite.trainer.folder import RunFolder
from gptlite.trainer.observers import Observer, due
from gptlite.trainer.state import TrainState

FAILED_SECONDS = 1.0  # time that a run which has failed gives its thread to end


class MemoryCheckpoints(Observer):
    """Checkpoints in memory every `checkpoint.memory_interval` steps, and after the last step of a run that is stopped.

    A step waits only until this rank's parts are copied to its shelf. Then a thread hashes them, and exchanges copies
    with partners on `checkpoint.replicas` other nodes. A place of the shelf has COPIES files. The one with the newest
    checkpoint that all ranks have completed is not written, so if the last one is not complete when the next is due,
    the next is skipped.

    `recall` comes first, before the run's first step. `shelf` None stands for memory of this process.
    """

    def __init__(self, config: Config, shelf: Shelf | None = None) -> None:
        self._interval, self._last_step = config.checkpoint.memory_steps, config.trainer.last_step
        self._replicas, self._timeout = config.checkpoint.replicas, config.parallelism.timeout_seconds
        self.shelf = shelf or Shelf.new(platform.node(), os.getppid(), self._replicas)
        self._files = [[File(descriptor) for descriptor in place] for place in self.shelf.places]
        self._gate = Gate()
        self._work: Background | None = None
        self._safe = self._last = -1  # step of the newest checkpoint that is complete on all ranks; of the last save
        self._waits = self._ended = self._failed = False
        self._views: dict[int, list[Tensor]] = {}
        self._keys: Collection[str] | None = None  # of the tensors that are laid out
        self._staging: Tensor | None = None
        self.saved, self.skipped, self.stall_seconds, self.busy_seconds = 0, 0, 0.0, 0.0
        self.excluded: Callable[[], AbstractContextManager[None]] = nullcontext  # counts the time of a save

    def recall(self, run: Run, folder: RunFolder, reached: int = sys.maxsize - 1) -> bool:
        """Fill the state from memory, if it has a checkpoint of this run that is not older than the one on disk.

        Checkpoints of steps after `reached` do not count. A node that comes back may hold some that the run, which has
        gone back further since, has not reached again.
        Returns False, and logs why, if the state is to be restored from disk, or if the run is new. Collective.
        """
        self._state, self._mesh, self._log = run.state, run.mesh, folder.log
        self._main_log: Log = folder.log if run.mesh.is_main else lambda text: None
        self._config = to_yaml(run.config)
        self._run = f"{folder.path.resolve()} {_fingerprint(run.config)}"
        self._layout = folder.layout
        self._group: dist.ProcessGroup | None = None
        if run.mesh.world_size > 1:
            limit = timedelta(seconds=self._timeout)
            self._group = dist.new_group(backend="gloo", timeout=limit)  # type: ignore[assignment]
        save, self._nodes = uuid.uuid4().hex, from_all(run.mesh, lambda: self.shelf.node)
        self._save_id = from_main(run.mesh, lambda: save)
        self._steps = [[self._newest(file) for file in place] for place in self._files]
        on_disk = folder.resume_from
        step = from_main(run.mesh, lambda: read_manifest(on_disk).meta["step"] if on_disk else -1)
        began = time.monotonic()
        held, reason = self._find(range(step, reached + 1))
        notes: list[str] = []
        if held is not None:
            try:
                notes = self._restore(held)
            except ValueError as error:  # on all ranks
                held, reason = None, f"memory is of another run: {error}"
        if held is not None:
            for line in notes:
                self._log(line)
            ranks = {held.source(part, rank) for part in held.holders for rank in range(run.mesh.world_size)}
            numbers = node_names(self.shelf)
            nodes = sorted({str(numbers.get(self._nodes[rank], self._nodes[rank])) for rank in ranks})
            seconds = time.monotonic() - began
            self._main_log(f"restored step {held.name.step:,} from memory of {named('node', nodes)} in {seconds:.2f} s")
        elif reason:
            self._main_log(
                f"restored from {f'disk: {on_disk}' if on_disk else 'nothing: no step is on disk'} ({reason})"
            )
        return held is not None

    def before(self, state: TrainState) -> None:
        """Lay out this rank's parts before the first step. Drop the checkpoints of steps that were taken back."""
        if self._keys is None:
            self._lay_out(state.tensors())
        if state.step < self._last:
            self._wait(self._timeout)
            drop(self.shelf, state.step)
            self._steps = [[self._newest(file) for file in place] for place in self._files]
            self._safe = self._last = -1

    def reads(self, state: TrainState) -> bool:
        """Return True if a checkpoint is due after this step."""
        return due(state.step, self._interval)

    def settled(self, state: TrainState) -> None:
        """Save if it is due; while the steps of data ranks are apart, after their next exchange."""
        reduction = state.runner.mesh.reduction
        now = self._waits or due(state.step, self._interval)
        self._waits = now and reduction is not None and reduction.apart
        if now and not self._waits and state.step != self._last:
            with self.excluded():
                self._save(state)

    def ended(self, state: TrainState) -> None:
        """Save the last step of a run that will go on."""
        self._ended = True
        if state.clock >= self._last_step or state.step in (0, self._last):
            return
        state.settle()  # as the checkpoint on disk does
        self._wait(self._timeout)
        self._save(state)

    def close(self) -> None:
        """Wait for the copies, if the run has not failed, and write nothing to the shelf from then on."""
        self._wait(self._timeout if self._ended else FAILED_SECONDS)
        self._gate.close()
        if self._group is not None and not self._running:  # else the thread still uses it
            with suppress(Exception):
                dist.destroy_process_group(self._group)
            self._group = None

    def figures(self) -> dict[str, Any]:
        """Return the number of checkpoints in memory, and the seconds that steps waited for them."""
        counts = {"saved": self.saved, "skipped": self.skipped}
        seconds = {"stall_seconds": round(self.stall_seconds, 4), "thread_seconds": round(self.busy_seconds, 4)}
        return {"memory_checkpoints": counts | seconds}

    def closing(self) -> list[tuple[str, str]]:
        """Return the line of the results on checkpoints in memory."""
        words = f"{counted(self.saved, 'checkpoint')}, {self.skipped} skipped; steps waited {self.stall_seconds:.2g} s"
        return [("memory", words)]

    @property
    def _running(self) -> bool:
        return self._work is not None and self._work.running

    def _wait(self, seconds: float) -> None:
        """Wait until the thread has ended, at most some seconds."""
        end = time.monotonic() + seconds
        while self._running and time.monotonic() < end:
            time.sleep(0.002)

    def _find(self, steps: range) -> tuple[Held | None, str]:
        """Return the newest complete checkpoint in memory of these steps, or None and the reason. Collective."""
        records = [record for place in self._files for file in place for record in file.records()]
        return agree(records, self._run, self.shelf.node, self._mesh, self._main_log, steps)

    def _restore(self, held: Held) -> list[str]:
        """Fill the state from memory. Returns notes to print."""
        state, mesh = self._state, self._mesh
        stored = [key for key in held.boxes if key.startswith(PREFIX)]
        tensors = {key: value for key, value in state.tensors().items() if not key.startswith(PREFIX)}
        fill(tensors, held, mesh, self._group)
        notes = state.take(tensors)
        if mesh.reduction is not None:
            errors = mesh.reduction.requested(stored)
            fill(errors, held, mesh, self._group)
            notes += mesh.reduction.take(errors)
        elif stored:
            notes.append("the checkpoint's compression errors are dropped")
        first = held.holders[0][0]
        notes += state.load_meta(
            from_all(mesh, lambda: held.mine[0].header["meta"] if mesh.rank == first else {})[first]
        )
        self._safe = self._last = held.name.step
        return notes

    def _lay_out(self, tensors: dict[str, Tensor]) -> None:
        """Choose the boxes that this rank keeps, and allocate their memory. They stay the same while the keys do."""
        parts = Parts(tensors)
        new, self._keys = self._keys is None, frozenset(tensors)
        self._views.clear()
        parts.share(from_all(self._mesh, lambda: parts.offered), self._mesh.rank)
        self._boxes: list[Box] = []
        self._bytes = 0
        for key in parts.written:
            offset, sizes, described = parts.offered[key]
            self._boxes.append(Box(key, offset, sizes, tuple(described["shape"]), described["dtype"], self._bytes))
            self._bytes = rounded(self._bytes + self._boxes[-1].nbytes, ALIGN)
        self._bytes = rounded(self._bytes, 8 * ROW)
        fields = [[b.key, b.offset, b.sizes, b.shape, b.dtype, b.start] for b in self._boxes]
        self._boxes_json = json.dumps(fields)
        self._copies = Copies(self._nodes, self._mesh.rank, self._replicas, self._group)
        if any(local_tensor(tensors[box.key]).is_cuda for box in self._boxes):
            self._staging = torch.empty(self._bytes, dtype=torch.uint8, pin_memory=True)
        if new:
            self._announce(from_all(self._mesh, lambda: self._bytes), len(self._copies.targets))
        length = record_length(self._bytes, len(self._boxes_json) + len(self._config) + 4096)
        for place in self._files[: 1 + len(self._copies.targets)]:
            for file in place:
                if not len(file.memory):
                    file.resize(length)
                    file.memory.zero_()  # the kernel allocates pages at the first write, which is slow

    def _announce(self, sizes: list[int], kept: int) -> None:
        """Log the memory and the bytes of checkpoints. Raises ConfigError, on all ranks, if a node has too little."""
        shares: dict[str, int] = {}
        for node, size in zip(self._nodes, sizes, strict=True):
            shares[node] = shares.get(node, 0) + size
        held, sent = (1 + kept) * COPIES * max(shares.values()), kept * max(shares.values())
        room = min(from_all(self._mesh, memory_bytes))
        if held > room:
            raise ConfigError(
                f"checkpoint.memory_interval={self._interval} with checkpoint.replicas={self._replicas} needs "
                f"{format_bytes(held)} of a node's memory, which has {format_bytes(room)}; use more nodes, fewer "
                "replicas, or checkpoint.memory_interval=0"
            )
        line = f"every {counted(self._interval, 'step')}, {format_bytes(held)} of a node's memory"
        if kept:
            line += f"; a node sends {format_bytes(sent)} to {kept} other{'s' if kept > 1 else ''}"
        if kept < self._replicas:
            others = "no other node" if not kept else f"only {counted(kept, 'other node')}"
            line += f"; checkpoint.replicas={self._replicas}, but there is {others}"
        self._main_log(f"checkpoints in memory: {line}")

    def _save(self, state: TrainState) -> None:
        """Copy this rank's parts, and start the thread that does the rest. Collective."""
        began = time.perf_counter()
        work = self._work
        tensors = state.tensors()
        flag = 1 if work is None else 0 if work.running else -1 if work.failed else 1
        own = torch.tensor([flag, tensors.keys() == self._keys], device=self._mesh.device)
        agreed, same = all_reduce(own, self._mesh, op="min").tolist()
        if agreed < 1 or self._failed:
            self.skipped += 1
            if agreed < 0 and not self._failed:
                self._failed = True
                self._main_log("warning: checkpoints in memory end: a rank could not send its copy")
            return
        if not same:  # e.g. the errors of compressed sums, after the first one
            self._lay_out(tensors)
        self._safe = self._last
        version = self._free(0)
        header = self._header(state)
        file = self._files[0][version]
        self._steps[0][version] = -1
        (place,) = file.begin([record_length(self._bytes, len(header))])
        self._copy(tensors, place[PAGE : PAGE + self._bytes] if self._staging is None else self._staging)
        self._last = state.step
        self.saved += 1
        action = self._kept(place, header, version, state.step)
        self._work = Background(action, "checkpoint in memory", self._timeout, yielding=True)
        self.stall_seconds += time.perf_counter() - began

    def _copy(self, tensors: dict[str, Tensor], data: Tensor) -> None:
        """Copy this rank's parts to data, uint8."""
        views = self._views.get(data.data_ptr())
        if views is None:
            if len(self._views) >= COPIES:
                self._views.clear()
            views = self._views[data.data_ptr()] = [box.view(data) for box in self._boxes]
        for box, view in zip(self._boxes, views, strict=True):
            view.copy_(read_once(local_tensor(tensors[box.key]).detach()), non_blocking=True)
        if self._staging is not None:
            torch.cuda.current_stream().synchronize()

    def _header(self, state: TrainState) -> bytes:
        name = Name(self._run, self._save_id, state.step, self._mesh.world_size)
        more: dict[str, Any] = {"node": self.shelf.node}
        if self._mesh.is_main:
            more |= {"meta": state.meta(), "layout": self._layout, "config": self._config}
        return header_bytes(name, self._mesh.rank, self._boxes_json, more)

    def _kept(self, place: Tensor, header: bytes, version: int, step: int) -> Callable[[], None]:
        """Return the thread's work: to complete this rank's record, and to exchange copies."""

        def keep() -> None:
            began = time.perf_counter()
            try:
                with self._gate:
                    if self._staging is not None:
                        place[PAGE : PAGE + self._bytes] = self._staging
                    seal(place, self._bytes, header)
                    self._steps[0][version] = step
                for number in range(len(self._copies.targets)):
                    at = self._free(number + 1)
                    self._steps[number + 1][at] = -1
                    self._copies.swap(number, place, self._files[number + 1][at], self._gate)
                    self._steps[number + 1][at] = step
            except Stopped:
                return
            finally:
                self.busy_seconds += time.perf_counter() - began

        return keep

    def _free(self, place: int) -> int:
        """Return the version of a place to write: the oldest, but not the newest that is complete on all ranks."""
        steps = self._steps[place]
        return min((step == self._safe >= 0, step, version) for version, step in enumerate(steps))[2]

    def _newest(self, file: File) -> int:
        """Return the newest step of this run's records in a file, -1 without one."""
        return max((record.name.step for record in file.records() if record.name.run == self._run), default=-1)


def _fingerprint(config: Config) -> str:
    """Return a hash of the settings that determine the tensors of a run."""
    every = to_dict(config)
    text = json.dumps([every[key] for key in ("seed", "model", "optimizer")], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def drop(shelf: Shelf, after: int) -> None:
    """Drop the records of steps after step `after`, which no run may use meanwhile."""
    for file in (File(descriptor) for place in shelf.places for descriptor in place):
        if any(record.name.step > after for record in file.records()):
            file.clear()


def memory_checkpoints(config: Config, shelf: Shelf | None = None) -> MemoryCheckpoints | None:
    """Return the checkpoints in memory of a run, None if it keeps none."""
    return MemoryCheckpoints(config, shelf) if config.checkpoint.memory_steps else None
