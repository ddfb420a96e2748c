"""How long collectives take: a ring's bytes over the slowest link it crosses, and a latency for each hop.

Ranks lie on nodes in order, the tensor axis fastest (see layout.AXES). A group that has m ranks on a node sends through
m devices' network links at once, all of a node's groups at the same time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gptlite.parallelism.axes import WORLD
from gptlite.parallelism.layout import Layout
from gptlite.plan.config import ClusterConfig, LinkConfig
from gptlite.plan.cost_device import ranks_on_node
from gptlite.plan.workload import Transfer

# Times that a ring passes a tensor's (n-1)/n on.
TURNS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclass(frozen=True)
class Group:
    """Ranks of one axis: how many, how many of them on each node, on how many nodes."""

    ranks: int
    inside: int
    nodes: int


@dataclass(frozen=True)
class Links:
    """The links of a layout's ranks."""

    cluster: ClusterConfig
    layout: Layout

    def group(self, axis: str) -> Group:
        """The ranks of an axis, or of the world, as they lie on nodes."""
        node = ranks_on_node(self.cluster, self.layout.world_size)
        its = self.layout
        ranks, stride = (its.world_size, 1) if axis == WORLD else (its.size(axis), its.stride(axis))
        inside = min(ranks, max(1, node // stride))
        return Group(ranks, inside, -(-ranks // inside))

    def seconds(self, transfer: Transfer) -> float:
        """All of a transfer's collectives, one after the other; 0 for what is received, which its sender's time is."""
        if transfer.ranks < 2 or transfer.kind == "recv":
            return 0.0
        return transfer.count * self.once(transfer.kind, transfer.payload, self.group(transfer.axis))

    def once(self, kind: str, payload: float, group: Group) -> float:
        """One collective, or one message to the next rank of the group."""
        inside, between = self.cluster.intra, self.cluster.inter
        if kind not in TURNS:  # a message, or a broadcast passed on piece by piece: whole, over the slowest link
            link, speed = (between, self._between(1)) if group.nodes > 1 else (inside, self._inside())
            return payload / speed + link.latency
        turns = TURNS[kind]
        speed = self._inside() if group.inside > 1 else math.inf
        if group.nodes > 1:
            speed = min(speed, self._between(group.inside))
        share = (group.ranks - 1) / group.ranks
        # Large groups are reduced along trees.
        hops = group.nodes - 1 if kind != "all_reduce" else min(group.nodes - 1, math.ceil(math.log2(group.nodes)))
        latency = (group.inside - 1) * inside.latency + hops * between.latency
        return turns * (payload * share / speed + latency)

    def _inside(self) -> float:
        return self._of_device(self.cluster.intra)

    def _between(self, devices: int) -> float:
        """Bytes a second that a group with so many devices on a node sends to others."""
        return self._of_device(self.cluster.inter) * devices

    def _of_device(self, link: LinkConfig) -> float:
        users = min(link.shared, ranks_on_node(self.cluster, self.layout.world_size))
        return link.gb_per_second * 1e9 * link.efficiency / users
