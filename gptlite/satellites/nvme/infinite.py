"""Update of parameters that are in a file, with their gradients and moments (ZeRO-Infinity, arXiv:2104.07857)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gptlite.errors import ConfigError
from gptlite.metrics.console import format_bytes
from gptlite.optimizer.fused import is_fused
from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import together
from gptlite.satellites.nvme.parameters import ITEM, UNIT, ParameterFile
from gptlite.satellites.nvme.streamed import ParameterPiece, StateStream, StreamedOptimizer, stream_state

T = TypeVar("T")


class InfiniteOptimizer(StreamedOptimizer):
    """StreamedOptimizer whose parameters and gradients are in a ParameterFile as well."""

    scales_gradients = True

    def __init__(self, rule: Optimizer, folder: Path, buffer_bytes: int, parameters: ParameterFile) -> None:
        self._parameters = parameters
        super().__init__(rule, folder, buffer_bytes)

    def _stream(self, rule: Optimizer, folder: Path, buffer_bytes: int) -> StateStream:
        return InfiniteStream(rule, folder, buffer_bytes, self._parameters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        super().zero_grad(set_to_none)
        self._parameters.drop_gradients()

    def in_memory(self, tensor: Tensor) -> bool:
        """Return False if a local tensor's memory is a mapped file."""
        return not self._parameters.maps(tensor)

    def finish_backward(self) -> None:
        """Bring the mapped gradients up to date. Raises OffloadFailed."""
        self._parameters.settle()

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return `local_grad_norm` of the parameters, whose gradients are read from the file."""
        with self._parameters.file.dropping():
            norm = super().grad_norm(parameters)
        self._parameters.flush()  # drops the last pages
        return norm

    def describe(self, weights: str, gradients: str, path: str | None) -> str:
        """Return the place of the model state in words, with the sizes of `weights` and `gradients`."""
        stream, file = self.stream, self._parameters.file
        way = "O_DIRECT" if file.direct else "the page cache, without O_DIRECT"
        buffers = format_bytes(sum(each.nbytes for each in self.resident()))
        state = format_bytes(stream.file.size)
        return (
            f"{weights}, {gradients} and {state} of optimizer state in {path} by {way}, through buffers of {buffers} "
            "in total"
        )


class InfiniteStream(StateStream):
    """StateStream with two more rows per buffer, for parameters and gradients, which are in the file `parameters`."""

    def __init__(self, optimizer: Optimizer, folder: Path, buffer_bytes: int, parameters: ParameterFile) -> None:
        self.parameters, self._scale = parameters, None
        super().__init__(optimizer, folder, buffer_bytes, others=2)
        self._thread = parameters.thread  # all reads and writes of both files are in one order

    def wait(self) -> None:
        """Wait until all reads and writes are done. Raises OffloadFailed."""
        super().wait()
        self.parameters.wait()

    def settle(self) -> None:
        """Wait for I/O, and read everything again after it, as the mapped state may be changed."""
        super().settle()
        self.parameters.settle()

    def resident(self) -> list[Tensor]:
        """Return all tensors that take memory."""
        return super().resident() + [torch.frombuffer(each, dtype=torch.float32) for each in self.parameters.buffers]

    def run(self, optimizer: StreamedOptimizer, options: dict[str, Any]) -> None:
        """Take one step of the optimizer for the parameters that have gradients. Raises OffloadFailed."""
        self.parameters.begin_update()
        if not is_fused(optimizer):
            self._scale, options = options.get("scale"), {}
        super().run(optimizer, options)
        super().wait()
        self._there = [None, None]

    def _places(self) -> tuple[list[tuple[int, Tensor, int]], int]:
        places, total = [], self.parameters.total
        for number, group in enumerate(self._groups):
            for parameter in group["params"]:
                place = self.parameters.place_of(parameter)
                if place is None:  # without dims, or without elements on this rank
                    place, total = total, total + -(-local_tensor(parameter).numel() // UNIT) * UNIT
                places.append((number, parameter, place))
        return places, total

    def _tensors(self, piece: ParameterPiece, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        if self.parameters.place_of(piece.parameter) is None:
            values, gradients = super()._tensors(piece, rows)
            return values, gradients if self._scale is None else gradients * self._scale
        here = slice(piece.place, piece.place + piece.stop - piece.start)
        values, gradients = (row[here] for row in rows[-2:])
        return values, gradients if self._scale is None else gradients.mul_(self._scale)

    def _rows(self, count: int) -> list[tuple[int, memoryview]]:
        """Return the byte offset in the file and the memory in the buffer of a chunk's parameters and gradients."""
        size, total = len(self._tensor_rows[0][0]), self.parameters.total
        first = count % len(self._chunks) * size
        length = ITEM * max(0, min(first + size, total) - first)
        memory = self._memory[self._slot(count)][-2:]
        return [(ITEM * (row * total + first), each[:length]) for row, each in enumerate(memory)]

    def _read(self, count: int) -> None:
        super()._read(count)
        self.parameters.file.read(self._rows(count))

    def _write_and_read(self, count: int) -> None:
        """Write a chunk, and read the one after next unless it is of the next step."""
        values, following = self._rows(count)[:1], count + 2
        if count % len(self._chunks) + 2 >= len(self._chunks):
            self.file.write(self._parts(count))
            self.parameters.file.write(values)
        else:
            self.file.exchange(self._parts(count), self._parts(following))
            self.parameters.file.exchange(values, self._rows(following)[:1])
            self.parameters.file.read(self._rows(following)[1:])


def place_parameters(parts: Sequence[nn.Module], config: ParallelismConfig, mesh: Mesh) -> ParameterFile:
    """Move the parameters of parts on the meta device to a file. All ranks call this once; see `offload_state`."""
    return _created(lambda: ParameterFile(parts, _folder(config), max(1, config.prefetch)), "model", config, mesh)


def offload_state(
    optimizer: Optimizer, config: ParallelismConfig, mesh: Mesh, parameters: ParameterFile | None
) -> Optimizer:
    """Return the optimizer with its state in files. `parameters`: the result of `place_parameters`, if it was called.

    All ranks call this once. Raises ConfigError on all ranks if one of them cannot create its file.
    """
    size = config.offload_buffer_mib * 2**20

    def make() -> Optimizer:
        if parameters is None:
            return stream_state(optimizer, _folder(config), size)
        return InfiniteOptimizer(optimizer, _folder(config), size, parameters)

    return _created(make, "optimizer state", config, mesh)


def _created(make: Callable[[], T], what: str, config: ParallelismConfig, mesh: Mesh) -> T:
    def refused() -> T:
        try:
            return make()
        except OSError as error:
            raise ConfigError(
                f"parallelism.offload_path={config.offload_path}: rank {mesh.rank} cannot keep its {what} "
                f"there: {(error.strerror or str(error)).lower()}; free some space, or give another folder"
            ) from None

    return together(mesh, refused)


def _folder(config: ParallelismConfig) -> Path:
    return Path(config.offload_path or "").expanduser()
