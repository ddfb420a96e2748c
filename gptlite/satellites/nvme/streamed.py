"""Optimizer state in a file, streamed through two buffers during the step (ZeRO-Infinity, arXiv:2104.07857).

The local shards of all parameters, each aligned to a multiple of ALIGN bytes, form one sequence of elements. The file
holds one such sequence for each of the optimizer's moments. The sequence is cut into chunks. While the chunk in one
buffer is stepped, a thread writes the previous chunk from the other buffer and reads the next one into it. The first
two chunks of the next step are read, and the last ones of this step written, while the model computes.

The rule must be elementwise, so that a chunk can end anywhere. Each chunk is stepped by the optimizer's own rule on
views, so results are bit-identical to those without files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gptlite.metrics.console import format_bytes
from gptlite.optimizer.base import PiecewiseOptimizer
from gptlite.optimizer.clip import local_grad_norm
from gptlite.optimizer.fused import is_fused
from gptlite.optimizer.state import materialized
from gptlite.parallelism.boxes import cut_like, local_tensor
from gptlite.parallelism.in_files import InFiles
from gptlite.satellites.nvme.errors import told
from gptlite.satellites.nvme.state_file import ALIGN, StateFile, aligned

ITEM = 4  # bytes: state is fp32
UNIT = ALIGN // ITEM
Numbers = dict[str, Tensor]  # a parameter's state other than moments


@dataclass(frozen=True)
class ParameterPiece:
    """Elements `start` to `stop` of a parameter in group number `group`, at offset `place` in a chunk."""

    group: int
    parameter: Tensor
    start: int
    stop: int
    place: int


class StreamedOptimizer(PiecewiseOptimizer, InFiles):
    """Optimizer whose state is in a file in `folder`. Each of the two buffers takes up to `buffer_bytes`.

    The parameters must be on the CPU. Raises OSError if the file cannot be created.
    """

    def __init__(self, rule: Optimizer, folder: Path, buffer_bytes: int) -> None:
        super().__init__(rule)
        self.stream = self._stream(rule, folder, buffer_bytes)

    def _stream(self, rule: Optimizer, folder: Path, buffer_bytes: int) -> StateStream:
        return StateStream(rule, folder, buffer_bytes)

    def settle(self) -> None:
        """Bring the memory-mapped state up to date. Changes made to it before the next step take effect."""
        self.stream.settle()

    def resident(self) -> list[Tensor]:
        """Return the tensors that take memory: the two buffers, and the state other than moments."""
        return self.stream.resident()

    def describe(self, weights: str, gradients: str, path: str | None) -> str:
        """Return the place of the model state in words, with the sizes of `weights` and `gradients`."""
        stream = self.stream
        way = "O_DIRECT" if stream.file.direct else "the page cache, without O_DIRECT"
        buffers, size = format_bytes(sum(each.nbytes for each in self.resident())), format_bytes(stream.file.size)
        return (
            f"{weights} and {gradients} in host memory, {size} of optimizer state in {path} by {way}, through buffers "
            f"of {buffers} in total; each step reads {size} and writes {size}"
        )

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return `local_grad_norm` of the parameters."""
        return local_grad_norm(parameters, is_fused(self))

    def update(self, options: dict[str, Any]) -> None:
        """Take a step. Raises OffloadFailed."""
        self.stream.run(self, {key: value.cpu() for key, value in options.items()})


def stream_state(optimizer: Optimizer, folder: Path, buffer_bytes: int) -> Optimizer:
    """Return the optimizer with its state in a file, or the optimizer itself if it has no moments.

    Call this before the first step and before loading a checkpoint. See StreamedOptimizer for the arguments.
    """
    return StreamedOptimizer(optimizer, folder, buffer_bytes) if moments_of(optimizer) else optimizer


def moments_of(optimizer: Optimizer) -> list[str]:
    """Return the names of the state tensors with one element per parameter element."""
    return [key for key, value in _state_of_two(optimizer).items() if value.shape == (2,)]


def _state_of_two(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the initial state of a parameter with two elements."""
    probe = torch.zeros(2)  # two elements distinguish a moment [2] from a step count []
    found = materialized(optimizer, probe)
    del optimizer.state[probe]
    return found


class StateStream:
    """State file, its two buffers, and the location of each parameter in the chunks.

    Each buffer has a row per moment, and `others` more rows for subclasses.
    """

    def __init__(self, optimizer: Optimizer, folder: Path, buffer_bytes: int, others: int = 0) -> None:
        self._keys = moments_of(optimizer)
        self._groups, self._state = optimizer.param_groups, optimizer.state
        places, total = self._places()
        self._total, rows = total, len(self._keys) + others
        self._chunks, size = _chunks(places, total, buffer_bytes // (ITEM * rows))
        self.file = StateFile(folder, ITEM * total * len(self._keys))
        self._fill_state(optimizer, places)
        self._memory = [[aligned(ITEM * max(size, UNIT)) for _ in range(rows)] for _ in range(2)]
        self._tensor_rows = [[torch.frombuffer(row, dtype=torch.float32) for row in rows] for rows in self._memory]
        self._thread = ThreadPoolExecutor(1, "offload")
        self._there: list[Future[None] | None] = [None, None]  # pending I/O by buffer; None: empty
        self._count = 0  # chunks stepped so far, over all steps
        self._mapped = True  # True if the mapped state may have been written to

    def wait(self) -> None:
        """Wait until all reads and writes are done. Raises OffloadFailed."""
        with told():
            for future in self._there:
                if future is not None:
                    future.result()

    def settle(self) -> None:
        """Wait for I/O, and mark the buffers as empty, so that the next step fills them again."""
        self.wait()
        self._there = [None, None]
        self._mapped = True

    def resident(self) -> list[Tensor]:
        """Return all tensors that take memory."""
        numbers = [value for state in self._state.values() for key, value in state.items() if key not in self._keys]
        return [row for rows in self._tensor_rows for row in rows] + [v for v in numbers if isinstance(v, Tensor)]

    def run(self, optimizer: PiecewiseOptimizer, options: dict[str, Any]) -> None:
        """Take one step of the optimizer for the parameters that have gradients. Raises OffloadFailed."""
        if self._mapped:
            with told():
                self.file.flush()
            self._mapped = False  # from here on, the buffers are newer than the mapped state
        count = len(self._chunks)
        numbers: dict[Tensor, Numbers] = {}
        for chunk in self._chunks:
            for number in range(self._count, self._count + min(count, 2)):
                if self._there[self._slot(number)] is None:  # at the first step, or after `settle`
                    self._there[self._slot(number)] = self._thread.submit(self._read, number)
            slot = self._slot(self._count)
            future = self._there[slot]
            assert future is not None
            with told():
                future.result()
            groups, state = self._pieces(chunk, self._tensor_rows[slot], numbers)
            optimizer.step_pieces(groups, state, options)
            self._there[slot] = self._thread.submit(self._write_and_read, self._count)
            self._count += 1
        for parameter, stepped in numbers.items():
            for key, value in stepped.items():
                self._state[parameter][key].copy_(value)

    def _places(self) -> tuple[list[tuple[int, Tensor, int]], int]:
        """Return (group, parameter, first element) of each parameter, and the number of elements of all."""
        places, total = [], 0
        for number, group in enumerate(self._groups):
            for parameter in group["params"]:
                places.append((number, parameter, total))
                total += -(-local_tensor(parameter).numel() // UNIT) * UNIT
        return places, total

    def _tensors(self, piece: ParameterPiece, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the elements of a piece and their gradients, flat. `rows` are the rows of its buffer."""
        assert piece.parameter.grad is not None
        values, gradients = (
            local_tensor(piece.parameter).detach().view(-1),
            local_tensor(piece.parameter.grad).reshape(-1),
        )
        return values[piece.start : piece.stop], gradients[piece.start : piece.stop]

    def _slot(self, count: int) -> int:
        """Return the buffer of chunk number `count`, counted over all steps. A single chunk always uses buffer 0."""
        return count % 2 if len(self._chunks) > 1 else 0

    def _pieces(
        self, chunk: Sequence[ParameterPiece], rows: list[Tensor], numbers: dict[Tensor, Numbers]
    ) -> tuple[list[dict[str, Any]], dict[Tensor, Numbers]]:
        """Return parameter groups and state of a chunk, whose moments are in the buffer `rows`. The state other than
        moments, which the step changes, is also stored in `numbers`."""
        groups: list[dict[str, Any]] = [group | {"params": []} for group in self._groups]
        state: dict[Tensor, dict[str, Tensor]] = {}
        for piece in chunk:
            if piece.parameter.grad is None:
                continue
            view, view.grad = self._tensors(piece, rows)
            groups[piece.group]["params"].append(view)
            own = self._state[piece.parameter]
            # Clones: every piece of a parameter starts from the same step count.
            others = {k: v.clone() for k, v in own.items() if k not in self._keys and isinstance(v, Tensor)}
            length = piece.stop - piece.start
            moments = {key: row[piece.place : piece.place + length] for key, row in zip(self._keys, rows, strict=False)}
            state[view] = others | moments
            numbers[piece.parameter] = others
        return [group for group in groups if group["params"]], state

    def _fill_state(self, optimizer: Optimizer, places: list[tuple[int, Tensor, int]]) -> None:
        """Create every parameter's state: moments in the mapped file, the other tensors in memory."""
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
        """Return, for each moment, a chunk's byte offset in the file and its memory in the buffer."""
        size = len(self._tensor_rows[0][0])
        first = count % len(self._chunks) * size
        length = ITEM * (min(first + size, self._total) - first)
        rows = enumerate(self._memory[self._slot(count)][: len(self._keys)])
        return [(ITEM * (row * self._total + first), memory[:length]) for row, memory in rows]

    def _read(self, count: int) -> None:
        self.file.read(self._parts(count))

    def _write_and_read(self, count: int) -> None:
        """Write a chunk and read the one after next. One thread does all I/O, so that each read follows its write."""
        if len(self._chunks) > 1:
            self.file.exchange(self._parts(count), self._parts(count + 2))
        else:
            self.file.write(self._parts(count))


def _chunks(places: list[tuple[int, Tensor, int]], total: int, most: int) -> tuple[list[list[ParameterPiece]], int]:
    """Cut the state of the parameters into consecutive chunks of equal size, in whole pages and at least one page.

    A chunk has at most `most` elements (unless a page has more) and at most about half of `total`. State of at most one
    page is a single chunk. Returns the pieces of each chunk, and the chunk size in elements.
    """
    # At most half of all elements, so that both buffers are used.
    size = max(1, min(most // UNIT, -(-total // (2 * UNIT)))) * UNIT
    chunks: list[list[ParameterPiece]] = [[] for _ in range(max(1, -(-total // size)))]
    for group, parameter, place in places:
        length = local_tensor(parameter).numel()
        first = min(place // size, len(chunks) - 1)  # an empty parameter, which also counts steps, may be at the end
        for index in range(first, max(first + 1, -(-(place + length) // size))):
            start, stop = max(0, index * size - place), min(length, (index + 1) * size - place)
            chunks[index].append(ParameterPiece(group, parameter, start, stop, max(0, place - index * size)))
    return chunks, size
