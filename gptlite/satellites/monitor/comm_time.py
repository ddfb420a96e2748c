"""Communication time per axis as a share of the training step, and detection of the slowest rank.

On a CPU, communication blocks the thread. Sampling the main thread's position twenty times a second therefore measures
the time spent in communication at almost no cost. On GPUs the process groups time their collectives. Time in a
collective includes waiting for its slowest rank, so the rank that spends the least time in collectives is the slowest.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gptlite.parallelism.axes import WORLD, kinds
from gptlite.parallelism.mesh import Mesh
from gptlite.satellites.monitor.flight_recorder import RecordedTime

WINDOW_SECONDS = 20.0  # half-life of a sample's weight in the moving average of the shares
NOTABLE = 0.1  # share of a step by which a rank's compute time must exceed the mean to be reported as slowest


@dataclass(frozen=True)
class Window:
    """Steps between two rows: each rank's share of the time that it was not in collectives, and their seconds. Equal on
    all ranks."""

    computing: list[float]
    seconds: float


class CommunicationTime:
    """Shares of the training time spent in collectives of each axis. On a CPU they are moving averages with a half-life
    of WINDOW_SECONDS. `add` and `row` are called from different threads. `window` has the steps before the last row,
    without an average; None before the third row, as the first steps connect, allocate and compile."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        # Seconds by axis (None: computation). `_new` has those since the last row, `_seconds` a moving average.
        self._new: Counter[str | None] = Counter()
        self._seconds: dict[str | None, float] = dict.fromkeys([*kinds(), None], 0.0)
        self._rows, self._read = 0, time.monotonic()
        self.window: Window | None = None
        groups = [dist.group.WORLD, *mesh.groups().values()]
        self._recorded = RecordedTime(groups) if mesh.device.type == "cuda" else None

    def add(self, axis: str | None, seconds: float) -> None:
        """Add time that the main thread spent in a collective along an axis, or in computation (None)."""
        self._new[axis] += seconds  # type: ignore[assignment]

    def row(self, step_seconds: float) -> dict[str, Any]:
        """Return entries for a metrics row, the same on all ranks. All ranks must call this after the same step.

        `comm_seconds_<axis>`: seconds per step in collectives along an axis, averaged over the ranks. The axis is a
        kind, such as tp, cp, pp or dp (both data axes, including context-parallel ranks), or world for collectives of
        all ranks. `slowest_rank`: the rank that the others waited for; None if no rank computed notably longer than the
        mean. `slowest_rank_<axis>`: the same along an axis, as an index on that axis.
        """
        shares, computing, seconds = self._shares()
        own = torch.tensor([*shares, computing, seconds], dtype=torch.float64, device=self._mesh.device)
        everyone = own.new_empty(self._mesh.world_size, len(own))
        dist.all_gather(list(everyone.unbind()), own)
        everyone = everyone.cpu()
        if self._rows > 2:
            self.window = Window(everyone[:, -2].tolist(), float(everyone[:, -1].max()))
        return summary(everyone[:, :-2], self._mesh, step_seconds)

    def _shares(self) -> tuple[list[float], float, float]:
        """Return the shares of each kind, and since the last row the share of computation and the seconds."""
        now = time.monotonic()
        since, self._read = now - self._read, now
        if self._recorded is not None:
            self._rows += 1
            recorded = self._recorded.shares()
            shares = [recorded.get(kind, 0.0) for kind in kinds()]
            return shares, max(0.0, 1 - sum(shares)), since
        new, self._new = self._new, Counter()  # replaced, not cleared, as the other thread keeps adding
        # The first row covers steps in which ranks connect, allocate and compile; the second row drops those samples.
        keep = 0.5 ** (new.total() / WINDOW_SECONDS) if self._rows != 1 else 0.0
        self._rows += 1
        self._seconds = {axis: keep * seconds + new[axis] for axis, seconds in self._seconds.items()}
        total = max(sum(self._seconds.values()), 1e-9)  # avoids a division by zero before the first sample
        fresh = new.total()
        return [self._seconds[kind] / total for kind in kinds()], new[None] / fresh if fresh else 0.0, fresh


def summary(shares: torch.Tensor, mesh: Mesh, step_seconds: float) -> dict[str, Any]:
    """Return entries for a metrics row, computed from all ranks' shares of a step [world size, number of kinds]."""
    sizes = {kind: mesh.layout.size(*axes) for kind, axes in kinds().items()}
    seconds = (shares.mean(0) * step_seconds).tolist()
    row: dict[str, Any] = {
        f"comm_seconds_{kind}": value for kind, value in zip(sizes, seconds, strict=True) if sizes[kind] > 1
    }
    computing = 1 - shares.sum(1)  # the slowest rank computes while the others wait for it
    row["slowest_rank"] = _slowest(computing)
    for kind, axes in kinds().items():
        if kind != WORLD and (size := sizes[kind]) > 1:
            index = torch.tensor([mesh.layout.coordinate(rank, *axes) for rank in range(mesh.world_size)])
            sums = torch.zeros(size, dtype=computing.dtype).index_add_(0, index, computing)
            row[f"slowest_rank_{kind}"] = _slowest(sums * size / mesh.world_size)
    return row


def _slowest(computing: torch.Tensor) -> int | None:
    slowest = int(computing.argmax())
    return slowest if computing[slowest] - computing.mean() > NOTABLE else None
