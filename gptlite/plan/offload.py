"""What offload keeps and moves, by arithmetic: bytes of a rank's state file, and what crosses to and from its host.

No torch here. Who moves what: gptlite.parallelism.zero (FSDP2), gptlite.optimizer.streamed (files).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gptlite.parallelism.config import Offload
from gptlite.plan.parameters import Parameter, stages
from gptlite.plan.traffic import gathered, reductions
from gptlite.plan.workload import MASTER, Workload

PAGE = 4096  # bytes: where each parameter begins in a state file


@dataclass(frozen=True)
class Moved:
    """Bytes of one step on a rank: shards that go to the device, gradients that come to the host, state read and
    written."""

    to_device: int = 0
    to_host: int = 0
    read: int = 0
    written: int = 0


def moved(work: Workload, pp_rank: int, tp_rank: int = 0) -> Moved:
    """What offload moves in a step. Of data ranks the first is meant, whose shards are the longest.

    Shards go to the device as often as they are gathered, before they are cast; gradients come back as often as they
    are reduced over all data ranks, in fp32.
    """
    if work.parallelism.offload is Offload.none:
        return Moved()
    shards, copies = work.layout.size("dp_shard"), work.layout.size("dp_replicate")
    there = back = 0
    for stage in stages(work, pp_rank, tp_rank):
        for elements, number, block in stage.groups(work.parallelism.bucket_layers, shards):
            times = sum(gathered(work, pp_rank, stage.number, block).values())
            there += work.stored * elements * number * times
            back += MASTER * elements * number * (reductions(work) if copies == 1 else 1)
    file = file_bytes(work, pp_rank, tp_rank)
    return Moved(there, back, file, file)


def file_bytes(work: Workload, pp_rank: int, tp_rank: int = 0) -> int:
    """The size of a rank's state file; 0 without one."""
    if work.parallelism.offload is not Offload.nvme:
        return 0
    shards = work.layout.size("dp_shard")
    sizes = (MASTER * p.shard(shards) for stage in stages(work, pp_rank, tp_rank) for p in stage.parameters())
    return work.optimizer.state_elements() * sum(-(-size // PAGE) * PAGE for size in sizes)


def buffers_bytes(work: Workload, parameters: Iterable[Parameter]) -> int:
    """Of the two buffers that a rank's optimizer state passes through: no more than it has."""
    rows, shards = work.optimizer.state_elements(), work.layout.size("dp_shard")
    pages = sum(-(-MASTER * parameter.shard(shards) // PAGE) for parameter in parameters)
    most = work.parallelism.offload_buffer_mib * 2**20 // max(1, rows * PAGE)
    return 2 * rows * PAGE * max(1, min(most, -(-pages // 2)))
