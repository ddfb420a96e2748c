"""Measured memory of one step on each rank, and the banner's line on offloaded state."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

import torch

from gptlite.metrics.console import format_bytes
from gptlite.optimizer.streamed import StreamedStep
from gptlite.parallelism.collectives import all_reduce
from gptlite.parallelism.config import Offload, ParallelismConfig
from gptlite.parallelism.host_copy import HostCopy
from gptlite.parallelism.memory import MASTER
from gptlite.parallelism.memory_phases import PHASES
from gptlite.parallelism.memory_watch import MemoryWatch
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.torch_private import profiler_runs, watched_shards
from gptlite.parallelism.zero import local_tensor
from gptlite.trainer.state import TrainState

Taken = TypeVar("Taken")
CATEGORIES = ("parameters", "gradients", "optimizer", "activations")


def offload_words(state: TrainState, config: ParallelismConfig) -> list[tuple[str, str]]:
    """Return the banner's line on rank 0's offloaded state; an empty list if nothing is offloaded."""
    if config.offload is Offload.none:
        return []
    shards = [local_tensor(p) for part in state.parts for p in part.parameters()]
    weights, gradients = sum(p.nbytes for p in shards), sum(MASTER * p.numel() for p in shards)
    dtype = "bf16" if weights < gradients else "fp32"
    text = f"{config.offload.value}: on rank 0 {format_bytes(weights)} of {dtype} weights"
    text += f" and {format_bytes(gradients)} of gradients"
    if not isinstance(state.optimizer, StreamedStep):
        return [("offload", f"{text}, and the optimizer's state, in host memory")]
    stream = state.optimizer.stream
    way = "O_DIRECT" if stream.file.direct else "the page cache, without O_DIRECT"
    buffers = format_bytes(sum(tensor.nbytes for tensor in state.optimizer.resident()))
    size = format_bytes(stream.file.size)
    return [("offload", f"{text} in host memory, {size} of optimizer state in {config.offload_path} by {way}, through "
                        f"buffers of {buffers} together: {size} are read and {size} written per step")]  # fmt: skip


class MemoryReport:
    """Measurement of one step's memory: the second step, when all persistent state exists.

    `row` is for metrics rows: empty before the measurement, then the maximum over ranks of each category, in bytes.
    """

    def __init__(self) -> None:
        self.row: dict[str, int] = {}
        self._found: list[list[int]] = []  # bytes of each category, rank by rank
        self._phases: list[int] = []  # maximum over ranks in each of PHASES
        # Per rank: peak bytes, average bytes, device utilisation in millionths.
        self._usage: list[list[int]] = []
        self._coming: HostCopy | None = None  # newer values, still being copied
        self._steps = 0
        self._to_device: list[int] = []  # bytes of this rank's shards in the measured step, where it offloads
        self._to_host: list[int] = []

    def due(self, last: bool) -> bool:
        """Return True if the next step is to be measured, the same on all ranks. `last` marks the run's last step."""
        return not self.row and (self._steps > 0 or last) and not profiler_runs()

    def take(
        self,
        step: Callable[[TrainState], Taken],
        state: TrainState,
        last: bool,
        excluded: Callable[[], AbstractContextManager[None]],
    ) -> Taken:
        """Run a step, and measure it if due. Set-up and evaluation of the measurement run under `excluded()`. Raises
        what the step raises."""
        due, self._steps = self.due(last), self._steps + 1
        if not due:
            return step(state)
        with ExitStack() as stack:
            with excluded():
                count = state.loader.micro_batches(state.consumed_samples)
                watch = MemoryWatch(state.parts, state.optimizer, state.runner.mesh.device, count)
                stack.enter_context(watch)
                stack.enter_context(watched_shards(state.parts, self._to_device.append, self._to_host.append))
            result = step(state)
            with excluded():
                stack.close()
                found = watch.found()
                each = (found.state.parameters, found.state.gradients, found.state.optimizer, found.activations)
                self._found = _everyone(each, state.runner.mesh)
                phases = _everyone([found.phases[phase] for phase in PHASES], state.runner.mesh)
        self._phases = list(map(max, zip(*phases, strict=True)))
        most = map(max, zip(*self._found, strict=True))
        self.row = {f"memory_{name}_bytes": size for name, size in zip(CATEGORIES, most, strict=True)}
        return result

    def gather(self, peak: int | None, average: int | None, utilization: float | None, mesh: Mesh) -> None:
        """Exchange each rank's peak and average memory so far, from gptlite.metrics, and its device utilisation.
        Collective; does not wait for a GPU."""
        self._take_usage()
        millionths = -1 if utilization is None else round(1e6 * utilization)
        self._coming = HostCopy(_table([peak or 0, average or 0, millionths], mesh))

    def _take_usage(self) -> None:
        """Take the newest values that have arrived, without waiting: a run that ends because of a hang must not block
        here."""
        if self._coming is not None and self._coming.arrived:
            self._usage, self._coming = self._coming.tolist(), None

    def ranks(self) -> list[dict[str, float | None]]:
        """Return the known values of each rank: bytes of the categories in the measured step, `peak`, `average` and
        `utilization`; None where unknown."""
        self._take_usage()
        count = max(len(self._found), len(self._usage))
        found = self._found or [[None] * len(CATEGORIES)] * count
        usage = self._usage or [[0, 0, -1]] * count
        rows: list[dict[str, float | None]] = []
        for sizes, (peak, average, used) in zip(found, usage, strict=True):
            row: dict[str, float | None] = dict(zip(CATEGORIES, sizes, strict=True))
            device = {
                "peak": peak or None,
                "average": average or None,
                "utilization": used / 1e6 if used >= 0 else None,
            }
            rows.append(row | device)
        return rows

    def lines(self) -> list[tuple[str, str]]:
        """Return the closing table's lines on memory; an empty list if nothing was measured."""
        if not self.row:
            return []
        sizes = [f"{name} {format_bytes(self.row[f'memory_{name}_bytes'])}" for name in CATEGORIES]
        phases = [f"{name} {format_bytes(size)}" for name, size in zip(PHASES, self._phases, strict=True)]
        return [("memory, at most", ", ".join(sizes)), ("peak, by phase", ", ".join(phases))]

    def offloaded(self) -> list[tuple[str, str]]:
        """Return the closing table's line on this rank's offload traffic in the measured step."""
        there, back = map(format_bytes, (sum(self._to_device), sum(self._to_host)))
        return [("offload per step", f"{there} of weights to the device, {back} of gradients to the host")]


def _everyone(values: Sequence[int], mesh: Mesh) -> list[list[int]]:
    """Return each rank's values in rank order, on all ranks. Collective."""
    return _table(values, mesh).tolist()


def _table(values: Sequence[int], mesh: Mesh) -> torch.Tensor:
    # Each rank fills its own row of zeros, so that the sum is a gather.
    table = torch.zeros(mesh.world_size, len(values), dtype=torch.int64, device=mesh.device)
    for index, value in enumerate(values):
        table[mesh.rank, index].fill_(value)  # a copy from the host would synchronise
    return all_reduce(table, mesh)
