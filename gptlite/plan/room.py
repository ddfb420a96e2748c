"""What there is room for: on devices, in the memory of their hosts, on the hosts' disks. No torch here."""

from __future__ import annotations

from gptlite.optimizer.config import AdamConfig, AdamWConfig, LambConfig, LionConfig, MuonConfig
from gptlite.parallelism.config import Offload
from gptlite.plan.config import ClusterConfig
from gptlite.plan.cost_device import ranks_on_node
from gptlite.plan.offload import file_bytes
from gptlite.plan.parameters import num_parameters
from gptlite.plan.workload import MASTER, RankBytes, Workload

GIB = 2**30
MEMORY_ERROR = 0.05  # of `memory.most`, on 64 layouts of up to eight real ranks (docs/planner_memory.md)


def rank_memory(cluster: ClusterConfig, world: int) -> float:
    """Bytes that a rank may take: a device's, or a rank's part of what the ranks on a CPU share."""
    ranks = ranks_on_node(cluster, world) if cluster.device == "cpu" else 1
    return (cluster.memory_gib / ranks - cluster.reserved_gib) * GIB


def too_large(work: Workload, memory: RankBytes, cluster: ClusterConfig, world: int) -> str:
    """Why a layout, whose fullest rank takes `memory`, does not fit; empty where it does, or where it is not known."""
    return (
        _on_device(memory.total, cluster, world, "at its fullest")
        or _on_host(memory.host, cluster, world)
        or _on_disk(work, cluster, world)
    )


def state_too_large(work: Workload, cluster: ClusterConfig, world: int) -> str:
    """As `too_large`, of the least that a layout can take. Quick, so that the exact count is spared what cannot fit."""
    host = _state_bytes(work, copies=2) if work.on_host else 0.0  # parameters, gradients and the optimizer's state
    return _on_device(least_bytes(work), cluster, world, "model state alone") or _on_host(host, cluster, world)


def least_bytes(work: Workload) -> float:
    """No more than a layout's fullest rank takes on its device: the mean over ranks of the parameters and the
    optimizer's state, in fp32."""
    return 0.0 if work.on_host else _state_bytes(work, copies=1)


def _state_bytes(work: Workload, copies: int) -> float:
    moments = {AdamWConfig: 2, AdamConfig: 2, LambConfig: 2, LionConfig: 1, MuonConfig: 1}.get(type(work.optimizer), 0)
    kept = 0 if work.parallelism.offload is Offload.nvme else moments
    cut = work.layout.size("tp") * work.layout.size("pp") * work.layout.size("dp_shard")
    return MASTER * (copies + kept) * num_parameters(work.model) / cut


def _on_device(size: float, cluster: ClusterConfig, world: int, words: str) -> str:
    limit = rank_memory(cluster, world)
    return _words(size, limit, f"on a rank, {words}") if size > limit else ""


def _on_host(size: float, cluster: ClusterConfig, world: int) -> str:
    if not size or cluster.host_memory_gib is None:
        return ""
    limit = cluster.host_memory_gib * GIB / ranks_on_node(cluster, world)
    return _words(size, limit, "of its host's memory for a rank") if size > limit else ""


def _on_disk(work: Workload, cluster: ClusterConfig, world: int) -> str:
    if work.parallelism.offload is not Offload.nvme or cluster.disk_gib is None:
        return ""
    ranks = ranks_on_node(cluster, world)
    size, limit = ranks * max(file_bytes(work, rank) for rank in range(work.layout.size("pp"))), cluster.disk_gib * GIB
    return _words(size, limit, "on the disk of a node") if size > limit else ""


def _words(size: float, limit: float, where: str) -> str:
    return f"{size / GIB:.1f} GiB {where}, and {limit / GIB:.1f} are there"
