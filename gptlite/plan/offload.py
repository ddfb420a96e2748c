"""Arithmetic of offload: bytes of a rank's state file, and its traffic to and from the host.

No torch here. The transfers are made by gptlite.parallelism.zero (FSDP2) and gptlite.optimizer.streamed (files).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gptlite.parallelism.config import Offload
from gptlite.plan.parameters import Parameter, stages
from gptlite.plan.traffic import gathered, reductions
from gptlite.plan.workload import MASTER, Workload

PAGE = 4096  # bytes: parameters are aligned to it in a state file


@dataclass(frozen=True)
class Moved:
    """Bytes of one step on a rank: shards copied to the device, gradients copied to the host, state read and
    written."""

    to_device: int = 0
    to_host: int = 0
    read: int = 0
    written: int = 0


def moved(work: Workload, pp_rank: int, tp_rank: int = 0) -> Moved:
    """Return the bytes that offload moves in a step, for the first data rank, whose shards are the longest.

    Shards are copied to the device, before the cast, as often as they are gathered. Gradients are copied back in fp32
    as often as they are reduced over all data ranks.
    """
    if work.parallelism.offload is Offload.none:
        return Moved()
    shards, copies = work.layout.size("dp_shard"), work.layout.size("dp_replicate")
    to_device = to_host = 0
    for stage in stages(work, pp_rank, tp_rank):
        for elements, number, block in stage.groups(work.parallelism.bucket_layers, shards):
            times = sum(gathered(work, pp_rank, stage.number, block).values())
            to_device += work.stored * elements * number * times
            to_host += MASTER * elements * number * (reductions(work) if copies == 1 else 1)
    file = file_bytes(work, pp_rank, tp_rank)
    return Moved(to_device, to_host, file, file)


def file_bytes(work: Workload, pp_rank: int, tp_rank: int = 0) -> int:
    """Return the size of a rank's state file; 0 without one."""
    if work.parallelism.offload is not Offload.nvme:
        return 0
    shards = work.layout.size("dp_shard")
    sizes = (MASTER * p.shard(shards) for stage in stages(work, pp_rank, tp_rank) for p in stage.parameters())
    return work.optimizer.state_elements() * sum(-(-size // PAGE) * PAGE for size in sizes)


def buffers_bytes(work: Workload, parameters: Iterable[Parameter]) -> int:
    """Return the bytes of the two buffers that a rank's optimizer state streams through, at most those of the state."""
    rows, shards = work.optimizer.state_elements(), work.layout.size("dp_shard")
    pages = sum(-(-MASTER * parameter.shard(shards) // PAGE) for parameter in parameters)
    most = work.parallelism.offload_buffer_mib * 2**20 // max(1, rows * PAGE)
    return 2 * rows * PAGE * max(1, min(most, -(-pages // 2)))
