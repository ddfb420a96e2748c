"""An optimizer's state in a file, passing through two buffers as the step is taken (ZeRO-Infinity, arXiv:2104.07857).

The local shards of all parameters, each from a multiple of ALIGN bytes on, are a line of elements, and the file holds
one such line for each of the optimizer's moments. The line is cut into chunks. While the step of a chunk is computed in
one buffer, a thread writes the chunk before it from the other and reads the one after it. The first two chunks of the
next step are read, and the last ones of this one written, while the model computes.

Only for rules that update each element by itself: then a chunk may end anywhere. The step of a chunk is the optimizer's
own, of views of that chunk, so the numbers are those that it has without files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gptlite.errors import ConfigError
from gptlite.optimizer.base import PieceRule, PiecewiseStep
from gptlite.optimizer.state import materialized
from gptlite.parallelism.boxes import cut_like
from gptlite.parallelism.config import Offload, ParallelismConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import together
from gptlite.parallelism.state_file import ALIGN, InFiles, StateFile, aligned
from gptlite.parallelism.zero import local_tensor

ITEM = 4  # bytes: state is fp32
UNIT = ALIGN // ITEM
Numbers = dict[str, Tensor]  # what of a parameter's state is no moment


class OffloadFailed(RuntimeError):
    """The files of an optimizer's state could not be read or written."""


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of a group's parameter, which are in a chunk from `place` on."""

    group: int
    parameter: Tensor
    start: int
    stop: int
    place: int


class StreamedStep(PiecewiseStep, InFiles):
    """What replaces the step of an optimizer whose state is in a file."""

    stream: Stream

    def settle(self) -> None:
        """The mapped state is up to date, and what is written to it before the next step counts."""
        self.stream.settle()

    def resident(self) -> list[Tensor]:
        """The two buffers, and the steps' numbers."""
        return self.stream.resident()

    def take(self, options: dict[str, Any]) -> None:
        """Raises OffloadFailed."""
        self.stream.run({key: value.cpu() for key, value in options.items()})


def offload_state(optimizer: Optimizer, config: ParallelismConfig, mesh: Mesh) -> Optimizer:
    """The optimizer with its state in files, if that is where it is to be: to be called once, by all ranks.

    Raises ConfigError, on all ranks, where one of them cannot make its file.
    """
    if config.offload is not Offload.nvme:
        return optimizer
    folder = Path(config.offload_path or "").expanduser()

    def make() -> Optimizer:
        try:
            return stream_state(optimizer, folder, config.offload_buffer_mib * 2**20)
        except OSError as error:
            raise ConfigError(
                f"parallelism.offload_path={config.offload_path}: rank {mesh.rank} cannot keep its optimizer state "
                f"there: {(error.strerror or str(error)).lower()}; free some space, or give another folder"
            ) from None

    return together(mesh, make)


def stream_state(optimizer: Optimizer, folder: Path, buffer_bytes: int) -> Optimizer:
    """The same optimizer, its state in a file in `folder` from now on: before its first step, or a checkpoint is read.

    Each of the two buffers takes up to `buffer_bytes`. Its step must be elementwise, and its parameters on the CPU.
    Raises OSError where the file cannot be made.
    """
    if not moments_of(optimizer):
        return optimizer
    optimizer.stream = Stream(optimizer, folder, buffer_bytes)  # type: ignore[attr-defined]
    StreamedStep.put_on(optimizer)
    return optimizer


def moments_of(optimizer: Optimizer) -> list[str]:
    """The names of the state that has an element for each of a parameter's."""
    return [key for key, value in _state_of_two(optimizer).items() if value.shape == (2,)]


def _state_of_two(optimizer: Optimizer) -> dict[str, Tensor]:
    """What the state of a parameter of two elements is before its first step."""
    probe = torch.zeros(2)
    found = materialized(optimizer, probe)
    del optimizer.state[probe]
    return found


class Stream:
    """The file, the two buffers, and what is where."""

    def __init__(self, optimizer: Optimizer, folder: Path, buffer_bytes: int) -> None:
        self._keys = moments_of(optimizer)
        self._groups, self._state = optimizer.param_groups, optimizer.state
        places, total = [], 0
        for number, group in enumerate(self._groups):
            for parameter in group["params"]:
                places.append((number, parameter, total))
                total += -(-local_tensor(parameter).numel() // UNIT) * UNIT
        self._total = total
        self._chunks, size = _chunks(places, total, buffer_bytes // (ITEM * len(self._keys)))
        self.file = StateFile(folder, ITEM * total * len(self._keys))
        self._fill_state(optimizer, places)
        self._rule = PieceRule(optimizer)
        # Two buffers, each a row a moment.
        self._memory = [[aligned(ITEM * max(size, UNIT)) for _ in self._keys] for _ in range(2)]
        self._buffers = [[torch.frombuffer(row, dtype=torch.float32) for row in rows] for rows in self._memory]
        self._thread = ThreadPoolExecutor(1, "offload")
        self._there: list[Future[None] | None] = [None, None]  # by buffer: what it waits for; None: nothing is in it
        self._count = 0  # chunks stepped so far, of all steps
        self._mapped = True  # whether the mapped state may have been written to

    @property
    def bytes_a_step(self) -> int:
        """What is read and written, together."""
        return 2 * self.file.size

    def wait(self) -> None:
        """Until nothing is being read or written. Raises OffloadFailed."""
        with _told():
            for future in self._there:
                if future is not None:
                    future.result()

    def settle(self) -> None:
        """Waits; the buffers are read again before the next step."""
        self.wait()
        self._there = [None, None]
        self._mapped = True

    def resident(self) -> list[Tensor]:
        """All tensors that take memory."""
        numbers = [value for state in self._state.values() for key, value in state.items() if key not in self._keys]
        return [row for rows in self._buffers for row in rows] + [v for v in numbers if isinstance(v, Tensor)]

    def run(self, options: dict[str, Any]) -> None:
        """One step, by the gradients there are. Raises OffloadFailed."""
        if self._mapped:
            with _told():
                self.file.flush()
            self._mapped = False
        count = len(self._chunks)
        numbers: dict[Tensor, Numbers] = {}
        for chunk in self._chunks:
            for number in range(self._count, self._count + min(count, 2)):
                if self._there[self._slot(number)] is None:
                    self._there[self._slot(number)] = self._thread.submit(self._read, number)
            slot = self._slot(self._count)
            future = self._there[slot]
            assert future is not None
            with _told():
                future.result()
            self._step(chunk, self._buffers[slot], numbers, options)
            self._there[slot] = self._thread.submit(self._write_and_read, self._count)
            self._count += 1
        for parameter, stepped in numbers.items():
            for key, value in stepped.items():
                self._state[parameter][key].copy_(value)

    def _slot(self, count: int) -> int:
        """The buffer of the chunk that is stepped after so many; one that is alone stays where it is."""
        return count % 2 if len(self._chunks) > 1 else 0

    def _step(
        self, chunk: Sequence[Piece], rows: list[Tensor], numbers: dict[Tensor, Numbers], options: dict[str, Any]
    ) -> None:
        """Takes a chunk's step with its moments in a buffer. `numbers`: what else each parameter's state then is."""
        groups: list[dict[str, Any]] = [group | {"params": []} for group in self._groups]
        state: dict[Tensor, dict[str, Tensor]] = {}
        for piece in chunk:
            if piece.parameter.grad is None:
                continue
            view = local_tensor(piece.parameter).detach().view(-1)[piece.start : piece.stop]
            view.grad = local_tensor(piece.parameter.grad).reshape(-1)[piece.start : piece.stop]
            groups[piece.group]["params"].append(view)
            own = self._state[piece.parameter]
            others = {k: v.clone() for k, v in own.items() if k not in self._keys and isinstance(v, Tensor)}
            length = piece.stop - piece.start
            moments = {key: row[piece.place : piece.place + length] for key, row in zip(self._keys, rows, strict=True)}
            state[view] = others | moments
            numbers[piece.parameter] = others
        self._rule.step([group for group in groups if group["params"]], state, options)

    def _fill_state(self, optimizer: Optimizer, places: list[tuple[int, Tensor, int]]) -> None:
        """Gives every parameter its state: moments in the mapped file, and numbers, which stay in memory."""
        mapped = self.file.mapped()
        numbers = {k: v for k, v in _state_of_two(optimizer).items() if k not in self._keys}
        for _, parameter, place in places:
            local = local_tensor(parameter)
            state: dict[str, Any] = {key: value.clone() for key, value in numbers.items()}
            for row, key in enumerate(self._keys):
                start = row * self._total + place
                state[key] = cut_like(parameter, mapped[start : start + local.numel()].view(local.shape))
            optimizer.state[parameter] = state

    def _parts(self, count: int) -> list[tuple[int, memoryview]]:
        """Where in the file a chunk's moments are, with the memory of its buffer for each."""
        size = len(self._buffers[0][0])
        first = count % len(self._chunks) * size
        length = ITEM * (min(first + size, self._total) - first)
        rows = enumerate(self._memory[self._slot(count)])
        return [(ITEM * (row * self._total + first), memory[:length]) for row, memory in rows]

    def _read(self, count: int) -> None:
        self.file.read(self._parts(count))

    def _write_and_read(self, count: int) -> None:
        """One thread does all of it in order, so that no chunk is read before it was written."""
        if len(self._chunks) > 1:
            self.file.exchange(self._parts(count), self._parts(count + 2))
        else:
            self.file.write(self._parts(count))


def _chunks(places: list[tuple[int, Tensor, int]], total: int, most: int) -> tuple[list[list[Piece]], int]:
    """The line of parameters in two or more equal chunks of at most `most` elements, and how many each has."""
    size = max(1, min(most // UNIT, -(-total // (2 * UNIT)))) * UNIT
    chunks: list[list[Piece]] = [[] for _ in range(max(1, -(-total // size)))]
    for group, parameter, place in places:
        length = local_tensor(parameter).numel()
        first = min(place // size, len(chunks) - 1)  # an empty one, which counts its steps too, may be at the end
        for index in range(first, max(first + 1, -(-(place + length) // size))):
            start, stop = max(0, index * size - place), min(length, (index + 1) * size - place)
            chunks[index].append(Piece(group, parameter, start, stop, max(0, place - index * size)))
    return chunks, size


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        words = "the optimizer's state in parallelism.offload_path cannot be read or written"
        raise OffloadFailed(f"{words}: {error.strerror or error}") from error
