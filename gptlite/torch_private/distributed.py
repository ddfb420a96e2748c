"""Process groups, device meshes and stages of pipelines."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

# Renamed in torch 2.13, where the old names warn.
all_gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Set a group's time limit for a collective."""
    # public since torch 2.14, where the private name warns
    set_group_timeout: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_group_timeout(timedelta(seconds=seconds), group)


def forget_meshes() -> None:
    """Clear DTensor's sharding propagation cache.

    A tensor on a new mesh would otherwise get an equal older mesh from the cache, whose process groups may be gone.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def abandon_groups() -> None:
    """Leave all process groups without waiting for the other ranks, which may have ended."""
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()
    # A join that has failed is counted, too, and the count is in the keys by which ranks find each other.
    dist.distributed_c10d._world.group_count = 0


def default_store() -> Any:
    """Return the store that the ranks joined with."""
    return dist.distributed_c10d._get_default_store()


class Stage(PipelineStage):
    """torch's stage, which sends nothing to its own rank."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # In a V schedule torch 2.11 lets the last rank send to itself at the start, which gloo does not support. torch
        # 2.15 has no such method.
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]
