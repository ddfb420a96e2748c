"""Memory and utilisation of each rank over a run, and the memory of one step by category."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from gptlite.parallelism.collectives import all_reduce
from gptlite.parallelism.host_copy import HostCopy
from gptlite.parallelism.mesh import Mesh
from gptlite.progress import format_bytes
from gptlite.satellites.monitor.memory_watch import MemoryWatch
from gptlite.satellites.monitor.process_memory import memory_in_use
from gptlite.satellites.monitor.usage import Usage
from gptlite.torch_private.dispatch import profiler_runs
from gptlite.torch_private.fsdp import watched_shards
from gptlite.trainer.observers import Observer
from gptlite.trainer.state import TrainState

CATEGORIES = ("parameters", "gradients", "optimizer", "activations")


class MemoryReport(Observer):
    """Report of the ranks' memory and utilisation, with a measurement of one step by category.

    That step is the second, when all persistent state exists, or the run's last step, if earlier. `row` has its values
    for metrics rows: the maximum over ranks of each category, in bytes. It is empty before the measurement.
    `excluded()` is entered while the measurement is set up and read, to exclude this time from the throughput.
    `offloads` adds a line on offloaded state to the table of results.
    """

    def __init__(
        self,
        mesh: Mesh,
        last_step: int,
        excluded: Callable[[], AbstractContextManager[None]] = nullcontext,
        offloads: bool = False,
    ) -> None:
        self._mesh, self._last_step, self._excluded, self._offloads = mesh, last_step, excluded, offloads
        self._use = Usage(mesh.device)
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
        with ExitStack() as stack:
            with self._excluded():
                count = state.loader.micro_batches(state.consumed_samples)
                watch = MemoryWatch(state.parts, state.optimizer, self._mesh.device, count)
                stack.enter_context(watch)
                stack.enter_context(watched_shards(state.parts, self._to_device.append, self._to_host.append))
            yield
            with self._excluded():
                stack.close()
                peaks = watch.found()
                sizes = (peaks.state.parameters, peaks.state.gradients, peaks.state.optimizer, peaks.activations)
                self._sizes = _everyone(sizes, self._mesh)
                phases = _everyone(list(peaks.phases.values()), self._mesh)
        self._phases = dict(zip(peaks.phases, map(max, zip(*phases, strict=True)), strict=True))
        most = map(max, zip(*self._sizes, strict=True))
        self.row = {f"memory_{name}_bytes": size for name, size in zip(CATEGORIES, most, strict=True)}

    def entries(self) -> dict[str, Any]:
        """Return this rank's memory and utilisation since the last row, and the values of `row`. Collective."""
        memory, use = memory_in_use(self._mesh.device), self._use.read()
        self.gather(memory["memory_peak_bytes"], self._use.memory, self._use.utilization)
        return memory | use | self.row

    def figures(self) -> dict[str, Any]:
        """Return this rank's average and peak memory and its utilisation, and the same of each rank."""
        return {
            "memory_average_bytes": self._use.memory,
            "utilization": self._use.utilization,
            "memory_ranks": self.ranks(),
            "memory_peak_bytes": memory_in_use(self._mesh.device)["memory_peak_bytes"],
        }

    def closing(self) -> list[tuple[str, str]]:
        """Return the lines on this rank's memory and utilisation, and on the measured step."""
        lines = []
        if (peak := memory_in_use(self._mesh.device)["memory_peak_bytes"]) is not None:
            average = self._use.memory
            text = format_bytes(peak) + (f", {format_bytes(average)} on average" if average else "")
            lines.append(("peak memory", text))
        used, gpu = self._use.utilization, self._mesh.device.type == "cuda"
        if used is not None or gpu:
            what = "GPU" if gpu else "processor time"
            lines.append(("utilisation", "n/a: install nvidia-ml-py" if used is None else f"{used:.0%} of the {what}"))
        return lines + self.lines() + (self.offloaded() if self._offloads else [])

    def close(self) -> None:
        """Stop sampling; the averages stay available."""
        self._use.close()

    def gather(self, peak: int | None, average: int | None, utilization: float | None) -> None:
        """Exchange each rank's peak and average memory in bytes, and its device utilisation (0 to 1), so far.

        Collective. The host does not wait for a GPU.
        """
        self._take_usage()
        millionths = -1 if utilization is None else round(1e6 * utilization)
        self._coming = HostCopy(_table([peak or 0, average or 0, millionths], self._mesh))

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
