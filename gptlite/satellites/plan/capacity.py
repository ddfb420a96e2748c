"""Memory and disk capacity of a cluster, and checks that a layout fits."""

from __future__ import annotations

from gptlite.config.cluster import ClusterConfig
from gptlite.parallelism.axes import EXPERT
from gptlite.parallelism.config import ActivationCheckpointing, Offload, ParallelismConfig
from gptlite.parallelism.layout import rule
from gptlite.satellites.plan.hardware import ranks_on_node
from gptlite.satellites.plan.parameters import cut, num_parameters
from gptlite.satellites.plan.profile import plain_profile
from gptlite.satellites.plan.timeline import warmup
from gptlite.satellites.plan.traffic import file_bytes
from gptlite.satellites.plan.workload import MASTER, RankBytes, Workload

GIB = 2**30
# Relative error of `memory.most`, measured on 64 layouts of up to eight ranks (docs/planner_memory.md).
MEMORY_ERROR = 0.05


def rank_memory(cluster: ClusterConfig, world: int) -> float:
    """Return the bytes that a rank may use: a device's memory, or on CPUs an equal share of the node's memory."""
    ranks = ranks_on_node(cluster, world) if cluster.device == "cpu" else 1
    return (cluster.memory_gib / ranks - cluster.reserved_gib) * GIB


def too_large(work: Workload, memory: RankBytes, cluster: ClusterConfig, world: int) -> str:
    """Return the reason why a layout with `memory` on its fullest rank does not fit; empty if it fits.

    Host memory and disks of unknown capacity are not checked.
    """
    return (
        _beyond(memory.total, rank_memory(cluster, world), "on the fullest rank")
        or _on_host(memory.host, cluster, world)
        or _on_disk(work, cluster, world)
    )


def least_too_large(work: Workload, state: float, cluster: ClusterConfig, world: int) -> str:
    """Return the reason why even a lower bound of a layout's memory does not fit; empty if it fits.

    `state` is the result of `least_bytes`. This cheap check saves the search from computing the exact memory of layouts
    that cannot fit.
    """
    host = _state_bytes(work, copies=2) if work.on_host else 0.0  # parameters, gradients and optimizer state
    room = rank_memory(cluster, world)
    return (
        _beyond(state, room, "per rank for the model state")
        or _on_host(host, cluster, world)
        or _beyond(state + least_activations(work), room, "per rank for the model state and activations")
    )


def least_activations(work: Workload) -> float:
    """Return a lower bound of the bytes of the blocks' activations on the first pipeline rank; 0 with
    recomputation."""
    config = work.parallelism
    if config.activation_checkpointing is not ActivationCheckpointing.none:
        return 0.0
    blocks = plain_profile(work).blocks
    least = min(sum(count * blocks[kind].left for kind, count in stage) for stage in cut(work).kinds[0][0])
    return least_in_flight(config, work.micro_batches) * least


def least_in_flight(config: ParallelismConfig, micro_batches: int) -> int:
    """Return the number of forward passes of single stages that the first pipeline rank runs before its first backward
    pass."""
    if rule(config).v_shape and config.pipeline > 1:
        return min(2 * config.pipeline - 1, micro_batches)
    return warmup(config, 0, micro_batches)


def least_bytes(work: Workload) -> float:
    """Return a lower bound of the bytes on a layout's fullest rank: the mean over ranks of fp32 parameters and
    optimizer state."""
    return 0.0 if work.on_host else _state_bytes(work, copies=1)


def _state_bytes(work: Workload, copies: int) -> float:
    """Return the mean bytes per rank of `copies` fp32 copies of the parameters, plus optimizer state in memory.

    Model state that is in files is left out.
    """
    kept = 0 if work.parallelism.offload is Offload.nvme else work.optimizer.moments
    copies *= not work.in_files
    layout = work.layout
    # Without ZeRO, the data ranks of an expert group hold different experts and replicas of all other parameters.
    among = layout.size(EXPERT) if layout.size("dp_shard") == 1 else 1
    return MASTER * (copies + kept) * num_parameters(work.model, among) / layout.size("tp", "pp", "dp_shard")


def _on_host(size: float, cluster: ClusterConfig, world: int) -> str:
    if cluster.host_memory_gib is None:
        return ""
    limit = cluster.host_memory_gib * GIB / ranks_on_node(cluster, world)
    return _beyond(size, limit, "of host memory per rank")


def _on_disk(work: Workload, cluster: ClusterConfig, world: int) -> str:
    if work.parallelism.offload is not Offload.nvme or cluster.disk_gib is None:
        return ""
    size = ranks_on_node(cluster, world) * max(file_bytes(work, rank) for rank in range(work.layout.size("pp")))
    return _beyond(size, cluster.disk_gib * GIB, "on a node's disk")


def _beyond(size: float, limit: float, where: str) -> str:
    return f"{size / GIB:.1f} GiB {where}; {limit / GIB:.1f} GiB available" if size > limit else ""
