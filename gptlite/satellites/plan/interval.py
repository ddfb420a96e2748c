"""Best interval between checkpoints, from the time of a save and the mean time between failures. Does not import torch.

Young 1974, "A first order approximation to the optimum checkpoint interval", doi:10.1145/361147.361115; Daly 2006, "A
higher order estimate of the optimum checkpoint interval for restart dumps", doi:10.1016/j.future.2004.11.016.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, sqrt

from gptlite.config.cluster import ClusterConfig
from gptlite.progress import format_duration

# Seconds from a failure to the next step, as assumed for a plan: until it is noticed, ranks meet and build the run
# again. Reading comes on top.
MEMORY_RESTART, DISK_RESTART = 20.0, 30.0


@dataclass(frozen=True)
class Failures:
    """Failures of a run and their price, in seconds: `mtbf` is the mean time between two failures of any of its nodes,
    `save` the time that steps wait for a checkpoint, `restart` the time from a failure to the next step."""

    mtbf: float
    save: float
    restart: float

    def young(self) -> float:
        """Return Young's estimate of the best seconds of training between two saves."""
        return sqrt(2 * self.save * self.mtbf)

    def daly(self) -> float:
        """Return Daly's higher-order estimate of the same, which stays right if saves are slow."""
        ratio = self.save / (2 * self.mtbf)
        if ratio >= 1:
            return self.mtbf
        return self.young() * (1 + sqrt(ratio) / 3 + ratio / 9) - self.save

    def goodput(self, interval: float, in_restarts: bool = True) -> float:
        """Return the expected share of the time that is useful, with `interval` seconds of training between two saves,
        in Daly's complete model: failures come at exponential times, also during saves and restarts. If not
        `in_restarts`, `mtbf` is the mean time without restarts, during which nothing fails."""
        exponent = (interval + self.save) / self.mtbf
        if exponent > 500:  # a run that hardly ever saves between two failures
            return 0.0
        cycle = self.mtbf * exp(self.restart / self.mtbf) if in_restarts else self.mtbf + self.restart
        return interval / (cycle * expm1(exponent))

    def best_steps(self, step: float) -> int:
        """Return the best number of steps between two saves, at least 1, for steps of `step` seconds."""
        return max(1, round(self.daly() / step))


def mtbf_of(hours: float, nodes: int) -> float:
    """Return the mean seconds between failures of any of `nodes` nodes that each fail once in `hours` on average."""
    return hours * 3600 / nodes


def mtbf_of_memory(hours: float, nodes: int, replicas: int, exposed: float) -> float:
    """Return the mean seconds between losses of a part of the checkpoints in memory, which only a disk survives.

    A part is on a node and on the `replicas` next ones. It is lost if all of them fail within `exposed` seconds, until
    the next copies exist. `replicas + 1` such sets contain a node.
    """
    return mtbf_of(hours, nodes) / ((replicas + 1) * min(1.0, exposed / (hours * 3600)) ** replicas)


@dataclass(frozen=True)
class PlannedSaves:
    """Planned saves of a run of `max_steps` steps: `size` in bytes of a checkpoint, `step` the seconds of a step, on
    `world` ranks. `replicas` and `in_background` are checkpoint.replicas and checkpoint.async_save."""

    cluster: ClusterConfig
    size: int
    world: int
    step: float
    max_steps: int
    replicas: int = 0
    in_background: bool = False

    @property
    def disk_seconds(self) -> float:
        """Seconds in which all nodes together write or read a checkpoint."""
        return self.size / ((self.cluster.nodes or 1) * self.cluster.disk_gb_per_second * 1e9)

    @property
    def copy_seconds(self) -> float:
        """Seconds in which each rank copies its share from the device to host memory."""
        return self.size / (self.world * self.cluster.host_link_gb_per_second * 1e9)

    def lines(self) -> list[tuple[str, str]]:
        """Return the lines of a plan on failures, as [(label, text)]; none unless `cluster.mtbf_hours` is set."""
        hours, nodes = self.cluster.mtbf_hours, self.cluster.nodes or 1
        if hours is None:
            return []
        mtbf = mtbf_of(hours, nodes)
        stall = self.copy_seconds if self.in_background else self.disk_seconds
        disk = Failures(mtbf, stall, DISK_RESTART + self.disk_seconds)
        every, least = self._steps(disk), 0 if not self.in_background else self.disk_seconds
        every = max(every, round(least / self.step))  # a save ends before the next one begins
        which = f"one of {nodes} nodes" if nodes > 1 else "the node"
        head = f"{which} every {format_duration(mtbf)}, planned with a restart in "
        lines = [
            ("failures", f"{head}{disk.restart:.0f} s from disk"),
            ("", f"checkpoint.interval={every}: {stall:.2g} s a save, goodput {self._goodput(disk, every):.1%}"),
        ]
        if nodes > 1:
            memory = Failures(mtbf, self.copy_seconds, MEMORY_RESTART + self.copy_seconds)
            often, replicas = self._steps(memory), self.replicas or 1
            exposed = memory.restart + often * self.step
            rest = Failures(mtbf_of_memory(hours, nodes, replicas, exposed), stall, disk.restart)
            seldom = max(self._steps(rest), often)
            both = self._goodput(memory, often) * self._goodput(rest, seldom)
            lines.append((
                "", f"checkpoint.memory_interval={often} checkpoint.replicas={replicas} checkpoint.interval={seldom}: "
                f"{self.copy_seconds:.2g} s a copy, restart in {memory.restart:.0f} s, goodput {both:.1%}"
            ))  # fmt: skip
        return lines

    def _steps(self, failures: Failures) -> int:
        return min(failures.best_steps(self.step), self.max_steps)

    def _goodput(self, failures: Failures, steps: int) -> float:
        return failures.goodput(steps * self.step)
