"""Departure of a node from an elastic run: one that stays slower than the others, or that computes wrong values."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from gptlite.config.schema import Config
from gptlite.parallelism.collectives import gather_objects
from gptlite.parallelism.mesh import Mesh
from gptlite.progress import Log
from gptlite.satellites.elastic.degree import largest
from gptlite.satellites.elastic.shelf import Shelf, node_names
from gptlite.satellites.monitor.comm_time import CommunicationTime, Window
from gptlite.trainer.observers import Observer, due

if TYPE_CHECKING:
    from gptlite.trainer.state import TrainState

SECONDS, TIMES = 10.0, 3  # shortest window in training steps, and consecutive windows in which a node must be slower


class Departure(Observer):
    """Departure of at most one node, after a checkpoint: a rank on the node ends the node's launcher by SIGTERM, the
    run saves after the step, and the other nodes go on.

    All ranks construct it and call `ask` with the same node. A node stays if the others cannot go on without it.
    """

    def __init__(self, config: Config, mesh: Mesh, shelf: Shelf, log: Log) -> None:
        self._config, self._mesh, self._shelf, self._log = config, mesh, shelf, log
        self.nodes = gather_objects(mesh, shelf.node)  # of each rank
        self._leaving, self._now = "", False

    def ask(self, node: str, why: str, now: bool = False) -> bool:
        """Have a node leave after the next checkpoint, or `now`: before the next step. Return whether it will; the
        answer and the reason are logged."""
        left = sum(other != node for other in self.nodes)
        leaves = not self._leaving and bool(largest(self._config, left))
        if leaves:
            self._leaving, self._now = node, now
        end = f"it leaves the run {'now' if now else 'after the next checkpoint'}"
        stays = f"it stays, as no layout of the run has {left} ranks or fewer"
        if self._mesh.is_main and not (self._leaving and not leaves):
            self._log(f"node {node_names(self._shelf).get(node, node)} {why}; {end if leaves else stays}")
        return leaves

    def before(self, state: TrainState) -> None:
        """End the launcher if a checkpoint has been saved after the last step."""
        checkpoint = self._config.checkpoint
        intervals = [interval for interval in (checkpoint.interval, checkpoint.memory_steps) if interval]
        if not self._leaving or not (self._now or not intervals or any(due(state.step, each) for each in intervals)):
            return
        if self.nodes.index(self._leaving) == self._mesh.rank:  # the first rank on the node
            os.kill(self._shelf.launcher, signal.SIGTERM)
        self._leaving = ""


class SlowNodes(Observer):
    """Decision that a node leaves an elastic run because it is slower than the others by `cluster.exclude_slow`.

    A node's time is that outside of collectives, of its slowest rank. It is compared with the median of the other
    nodes, only among ranks with the same pipeline coordinate, since stages differ. Windows are of SECONDS of steps or
    more. TIMES consecutive windows, at least 30 s, lead to a decision, so a hiccup in one of them does not; time in
    evaluations and saves does not count. The first two rows are left out.
    """

    def __init__(self, factor: float, mesh: Mesh, times: CommunicationTime, departure: Departure) -> None:
        self._factor, self._times, self._departure = factor, times, departure
        self._places = [(mesh.layout.coordinate(rank, "pp"), node) for rank, node in enumerate(departure.nodes)]
        self._last: Window | None = None
        self._computing, self._seconds = [0.0] * mesh.world_size, 0.0
        self._slow: dict[str, list[float]] = {}  # the last windows' ratios of each node that has been slow in all
        self._since = 0.0  # seconds of these windows

    def settled(self, state: TrainState) -> None:
        """Judge the nodes if a window is complete."""
        self.look()

    def before(self, state: TrainState) -> None:
        """Do the same where steps overlap."""
        self.look()

    def look(self) -> None:
        """Add the last row's times to the window, and judge the nodes once it is complete. Equal on all ranks."""
        window = self._times.window
        if window is None or window is self._last:
            return
        self._last = window
        pairs = zip(self._computing, window.computing, strict=True)
        self._computing = [before + share * window.seconds for before, share in pairs]
        self._seconds += window.seconds
        if self._seconds < SECONDS:
            return
        ratios = slowness(self._computing, self._places)
        self._slow = {
            node: [*self._slow.get(node, []), ratio] for node, ratio in ratios.items() if ratio >= self._factor
        }
        self._since = self._since + self._seconds if self._slow else 0.0
        self._computing, self._seconds = [0.0] * len(self._computing), 0.0
        long = {node: sum(each) / len(each) for node, each in self._slow.items() if len(each) >= TIMES}
        if long:
            node = max(sorted(long), key=lambda node: long[node])
            self._departure.ask(node, f"is {long[node]:.1f} times slower than the others over {self._since:.0f} s")
            self._slow, self._since = {}, 0.0


def slowness(computing: Sequence[float], places: Sequence[tuple[int, str]]) -> dict[str, float]:
    """Return how many times slower each node is than the median of the others, given each rank's time outside of
    collectives, pipeline coordinate and node. Nodes that share no pipeline coordinate with another are left out."""
    stages: dict[int, dict[str, float]] = defaultdict(dict)
    for seconds, (stage, node) in zip(computing, places, strict=True):
        stages[stage][node] = max(seconds, stages[stage].get(node, 0.0))
    ratios: dict[str, float] = {}
    for times in stages.values():
        for node, seconds in times.items():
            others = [each for other, each in times.items() if other != node]
            if others and (usual := median(others)):
                ratios[node] = max(seconds / usual, ratios.get(node, 0.0))
    return ratios
