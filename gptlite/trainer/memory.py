"""Memory measurement of one step on each rank, and the start banner's line on offloaded state."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from gptlite.metrics.console import format_bytes
from gptlite.optimizer.streamed import StreamedStep
from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.collectives import all_reduce
from gptlite.parallelism.config import Offload, ParallelismConfig
from gptlite.parallelism.host_copy import HostCopy
from gptlite.parallelism.memory import MASTER
from gptlite.parallelism.mesh import Mesh
from gptlite.torch_private.fsdp import watched_shards
from gptlite.torch_private.profiler import profiler_runs
from gptlite.trainer.observers import Observer
from gptlite.trainer.state import TrainState

CATEGORIES = ("parameters", "gradients", "optimizer", "activations")


def offload_words(state: TrainState, config: ParallelismConfig) -> list[tuple[str, str]]:
    """Return the banner's line on rank 0's offloaded state as [(label, text)]; an empty list without offload."""
    if config.offload is Offload.none:
        return []
    shards = [local_tensor(p) for part in state.parts for p in part.parameters()]
    weights, gradients = sum(p.nbytes for p in shards), sum(MASTER * p.numel() for p in shards)
    dtype = "bf16" if weights < gradients else "fp32"
    text = f"{config.offload.value}: on rank 0 {format_bytes(weights)} of {dtype} weights"
    text += f" and {format_bytes(gradients)} of gradients"
    if not isinstance(state.optimizer, StreamedStep):
        return [("offload", f"{text}, and the optimizer state, in host memory")]
    stream = state.optimizer.stream
    way = "O_DIRECT" if stream.file.direct else "the page cache, without O_DIRECT"
    buffers = format_bytes(sum(tensor.nbytes for tensor in state.optimizer.resident()))
    size = format_bytes(stream.file.size)
    return [("offload", f"{text} in host memory, {size} of optimizer state in {config.offload_path} by {way}, through "
                        f"buffers of {buffers} in total; each step reads {size} and writes {size}")]  # fmt: skip


class MemoryReport(Observer):
    """Memory measurement of one step: the second, when all persistent state exists, or the run's last step, if earlier.

    `row` has the values for metrics rows: the maximum over ranks of each category, in bytes. It is empty before the
    measurement. `excluded()` is entered while the measurement is set up and read, to exclude this time from the
    throughput.
    """

    def __init__(self, last_step: int, excluded: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._last_step, self._excluded = last_step, excluded
        self.row: dict[str, int] = {}
        self._sizes: list[list[int]] = []  # bytes of each of CATEGORIES, per rank
        self._phases: dict[str, int] = {}  # peak bytes by phase of the step, maximum over ranks
        # Per rank: peak bytes, average bytes, device utilisation in millionths.
        self._usage: list[list[int]] = []
        self._coming: HostCopy | None = None  # newer usage values, still being copied to the host
        self._steps = 0
        # Bytes of each transfer of this rank's shards in the measured step; empty without offload.
        self._to_device: list[int] = []
        self._to_host: list[int] = []

    def reads(self, state: TrainState) -> bool:
        """Return True if the next step is measured."""
        last = state.step + 1 == self._last_step
        return not self.row and (self._steps > 0 or last) and not profiler_runs()

    @contextmanager
    def during(self, state: TrainState) -> Iterator[None]:
        """Measure the step's memory if due."""
        measures, self._steps = self.reads(state), self._steps + 1
        if not measures:
            yield
            return
        mesh = state.runner.mesh
        with ExitStack() as stack:
            with self._excluded():
                from gptlite.monitor.memory_watch import MemoryWatch

                count = state.loader.micro_batches(state.consumed_samples)
                watch = MemoryWatch(state.parts, state.optimizer, mesh.device, count)
                stack.enter_context(watch)
                stack.enter_context(watched_shards(state.parts, self._to_device.append, self._to_host.append))
            yield
            with self._excluded():
                stack.close()
                peaks = watch.found()
                sizes = (peaks.state.parameters, peaks.state.gradients, peaks.state.optimizer, peaks.activations)
                self._sizes = _everyone(sizes, mesh)
                phases = _everyone(list(peaks.phases.values()), mesh)
        self._phases = dict(zip(peaks.phases, map(max, zip(*phases, strict=True)), strict=True))
        most = map(max, zip(*self._sizes, strict=True))
        self.row = {f"memory_{name}_bytes": size for name, size in zip(CATEGORIES, most, strict=True)}

    def gather(self, peak: int | None, average: int | None, utilization: float | None, mesh: Mesh) -> None:
        """Exchange each rank's peak and average memory in bytes, and its device utilisation (0 to 1), so far.

        Collective. The host does not wait for a GPU.
        """
        self._take_usage()
        millionths = -1 if utilization is None else round(1e6 * utilization)
        self._coming = HostCopy(_table([peak or 0, average or 0, millionths], mesh))

    def _take_usage(self) -> None:
        """Store the newest values if they have arrived. Never waits, so that a run can end after a hang."""
        if self._coming is not None and self._coming.arrived:
            self._usage, self._coming = self._coming.wait().tolist(), None

    def ranks(self) -> list[dict[str, float | None]]:
        """Return each rank's bytes of CATEGORIES in the measured step, `peak`, `average` and `utilization`.

        Unknown values are None.
        """
        self._take_usage()
        count = max(len(self._sizes), len(self._usage))
        measured = self._sizes or [[None] * len(CATEGORIES)] * count
        usage = self._usage or [[0, 0, -1]] * count
        rows: list[dict[str, float | None]] = []
        for sizes, (peak, average, used) in zip(measured, usage, strict=True):
            row: dict[str, float | None] = dict(zip(CATEGORIES, sizes, strict=True))
            device = {
                "peak": peak or None,
                "average": average or None,
                "utilization": used / 1e6 if used >= 0 else None,
            }
            rows.append(row | device)
        return rows

    def lines(self) -> list[tuple[str, str]]:
        """Return the closing table's lines on memory as [(label, text)]; an empty list if nothing was measured."""
        if not self.row:
            return []
        sizes = [f"{name} {format_bytes(self.row[f'memory_{name}_bytes'])}" for name in CATEGORIES]
        phases = [f"{name} {format_bytes(size)}" for name, size in self._phases.items()]
        return [("tensors, at most", ", ".join(sizes)), ("tensors, by phase", ", ".join(phases))]

    def offloaded(self) -> list[tuple[str, str]]:
        """Return the closing table's line on this rank's host-device transfers in the measured step."""
        there, back = map(format_bytes, (sum(self._to_device), sum(self._to_host)))
        return [("offload per step", f"{there} of weights to the device, {back} of gradients to the host")]


def _everyone(values: Sequence[int], mesh: Mesh) -> list[list[int]]:
    """Return each rank's values in rank order, on all ranks. Collective."""
    return _table(values, mesh).tolist()


def _table(values: Sequence[int], mesh: Mesh) -> torch.Tensor:
    # Each rank fills its row of a zero table, so the sum over ranks contains all rows.
    table = torch.zeros(mesh.world_size, len(values), dtype=torch.int64, device=mesh.device)
    for index, value in enumerate(values):
        table[mesh.rank, index].fill_(value)  # a copy from the host would synchronise
    return all_reduce(table, mesh)
