"""Bytes of an optimizer's state on a rank, on its device or in the buffers that lead to its file."""

from __future__ import annotations

from gptlite.optimizer.config import Shard
from gptlite.parallelism.config import Offload
from gptlite.plan.offload import buffers_bytes
from gptlite.plan.parameters import Stage
from gptlite.plan.workload import MASTER, Workload


def moments_bytes(work: Workload, held: list[Stage]) -> int:
    """All of it, or with state in files what stays in memory: their buffers, and counts of steps."""
    if work.parallelism.offload is Offload.nvme:
        parameters = [parameter for stage in held for parameter in stage.parameters()]
        return buffers_bytes(work, parameters) + MASTER * len(parameters) * work.optimizer.counts
    shards = work.layout.size("dp_shard")
    kinds = [(stage.others, False, 1) for stage in held] + [(stage.block, True, stage.layers) for stage in held]
    return work.optimizer.state_bytes(
        [Shard(each.shard(shards), each.width, inside, count) for group, inside, count in kinds for each in group]
    )
