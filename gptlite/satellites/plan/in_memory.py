"""Predicted cost of checkpoints in memory (`checkpoint.memory_interval`): host memory, and bytes between nodes."""

from __future__ import annotations

from dataclasses import dataclass

from gptlite.config.cluster import ClusterConfig
from gptlite.progress import format_bytes
from gptlite.satellites.plan.capacity import GIB
from gptlite.satellites.plan.hardware import ranks_on_node
from gptlite.satellites.plan.parameters import num_parameters
from gptlite.satellites.plan.workload import MASTER, Workload

VERSIONS = 2  # of each part, as gptlite.satellites.elastic.shelf.COPIES


@dataclass(frozen=True)
class InMemory:
    """Cost of checkpoints in memory. `held` are bytes of a node's host memory, `sent` bytes that a node sends to others
    for a checkpoint, which takes `seconds` of its links."""

    held: float
    sent: float
    seconds: float

    @classmethod
    def of(cls, work: Workload, replicas: int, cluster: ClusterConfig) -> InMemory:
        """Predict the cost of a layout, with `replicas` copies on other nodes.

        Each element of the state is in one rank's part, whatever the layout.
        """
        ranks = ranks_on_node(cluster, work.layout.world_size)
        nodes = -(-work.layout.world_size // ranks)
        share = MASTER * (1 + work.optimizer.moments) * num_parameters(work.model) / nodes
        copies, link = min(replicas, nodes - 1), cluster.inter
        rate = link.gb_per_second * link.efficiency * 1e9 * max(1.0, ranks / link.shared)
        return cls((1 + copies) * VERSIONS * share, copies * share, copies * share / rate)

    def words(self, interval: int, cluster: ClusterConfig, step_seconds: float) -> str:
        """Return the cost in words, and a warning if the host memory of a node does not hold the checkpoints."""
        text = f"every {interval} steps: {format_bytes(self.held)} of host memory per node"
        if self.sent:
            share = self.seconds / (interval * step_seconds)
            text += (
                f"; a node sends {format_bytes(self.sent)}, {self.seconds:.2g} s of its links, {share:.2g} of the time"
            )
        limit = cluster.memory_gib if cluster.device == "cpu" else cluster.host_memory_gib
        if limit is not None and self.held > limit * GIB:
            key = "memory_gib" if cluster.device == "cpu" else "host_memory_gib"
            text += f"; too much for cluster.{key}={limit:.3g}: use more nodes, or fewer checkpoint.replicas"
        return text
