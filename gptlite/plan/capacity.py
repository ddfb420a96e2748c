"""Capacity of devices, of their hosts' memory and disks, and the layouts that exceed it. No torch here."""

from __future__ import annotations

from gptlite.parallelism.axes import EXPERT
from gptlite.parallelism.config import ActivationCheckpointing, Offload, ParallelismConfig
from gptlite.parallelism.layout import rule
from gptlite.plan.config import ClusterConfig
from gptlite.plan.hardware import ranks_on_node
from gptlite.plan.parameters import cut, num_parameters
from gptlite.plan.profile import plain_profile
from gptlite.plan.timeline import warmup
from gptlite.plan.traffic import file_bytes
from gptlite.plan.workload import MASTER, RankBytes, Workload

GIB = 2**30
MEMORY_ERROR = 0.05  # of `memory.most`, on 64 layouts of up to eight real ranks (docs/planner_memory.md)


def rank_memory(cluster: ClusterConfig, world: int) -> float:
    """Bytes that a rank may take: a device's, or a rank's part of what the ranks on a CPU share."""
    ranks = ranks_on_node(cluster, world) if cluster.device == "cpu" else 1
    return (cluster.memory_gib / ranks - cluster.reserved_gib) * GIB


def too_large(work: Workload, memory: RankBytes, cluster: ClusterConfig, world: int) -> str:
    """Return the reason why a layout with `memory` on its fullest rank does not fit; empty if it fits or if that is
    unknown."""
    return (
        _on_device(memory.total, cluster, world, "at its fullest")
        or _on_host(memory.host, cluster, world)
        or _on_disk(work, cluster, world)
    )


def least_too_large(work: Workload, state: float, cluster: ClusterConfig, world: int) -> str:
    """Return the reason why even a lower bound of a layout's memory does not fit; `state` is `least_bytes`.

    It is cheap, and spares the search the exact count of layouts that cannot fit.
    """
    host = _state_bytes(work, copies=2) if work.on_host else 0.0  # parameters, gradients and the optimizer's state
    return (
        _on_device(state, cluster, world, "model state alone")
        or _on_host(host, cluster, world)
        or _on_device(state + least_activations(work), cluster, world, "model state and kept activations alone")
    )


def least_activations(work: Workload) -> float:
    """Return a lower bound of the activations that blocks keep on the first pipeline rank; 0 with recomputation."""
    config = work.parallelism
    if config.activation_checkpointing is not ActivationCheckpointing.none:
        return 0.0
    blocks = plain_profile(work).blocks
    least = min(sum(count * blocks[kind].left for kind, count in stage) for stage in cut(work).kinds[0][0])
    return least_in_flight(config, work.micro_batches) * least


def least_in_flight(config: ParallelismConfig, micro_batches: int) -> int:
    """Return the number of single-stage forward passes that the first pipeline rank runs before its first backward
    pass."""
    if rule(config).v_shape and config.pipeline > 1:
        return min(2 * config.pipeline - 1, micro_batches)
    return warmup(config, 0, micro_batches)


def least_bytes(work: Workload) -> float:
    """Return a lower bound of the bytes on a layout's fullest rank: the mean over ranks of fp32 parameters and
    optimizer state."""
    return 0.0 if work.on_host else _state_bytes(work, copies=1)


def _state_bytes(work: Workload, copies: int) -> float:
    kept = 0 if work.parallelism.offload is Offload.nvme else work.optimizer.moments
    layout = work.layout
    # Without ZeRO, data ranks that share experts hold copies of all else.
    among = layout.size(EXPERT) if layout.size("dp_shard") == 1 else 1
    return MASTER * (copies + kept) * num_parameters(work.model, among) / layout.size("tp", "pp", "dp_shard")


def _on_device(size: float, cluster: ClusterConfig, world: int, words: str) -> str:
    return _beyond(size, rank_memory(cluster, world), f"on a rank, {words}")


def _on_host(size: float, cluster: ClusterConfig, world: int) -> str:
    if cluster.host_memory_gib is None:
        return ""
    return _beyond(
        size, cluster.host_memory_gib * GIB / ranks_on_node(cluster, world), "of its host's memory for a rank"
    )


def _on_disk(work: Workload, cluster: ClusterConfig, world: int) -> str:
    if work.parallelism.offload is not Offload.nvme or cluster.disk_gib is None:
        return ""
    size = ranks_on_node(cluster, world) * max(file_bytes(work, rank) for rank in range(work.layout.size("pp")))
    return _beyond(size, cluster.disk_gib * GIB, "on the disk of a node")


def _beyond(size: float, limit: float, where: str) -> str:
    return f"{size / GIB:.1f} GiB {where}; {limit / GIB:.1f} GiB available" if size > limit else ""
