"""Nodes: equal runs of neighbouring ranks along `dp_shard`, within which messages are fast."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import from_main
from gptlite.satellites.zeropp.wire import machine_ranks
from gptlite.torch_private.distributed import set_timeout


@dataclass(frozen=True)
class Nodes:
    """`count` nodes of `size` ranks each, along `dp_shard`. `inside`: the group of the ranks of this rank's node.
    `across`: the group of the ranks that have its place in every node. A group of one rank is None."""

    count: int
    size: int
    inside: dist.ProcessGroup | None
    across: dist.ProcessGroup | None


def ranks_per_machine(mesh: Mesh) -> int:
    """Return `machine_ranks` for rank 0's machine. Collective."""
    # Set by torchrun and by our launcher; of rank 0, so that all ranks have the same.
    local = from_main(mesh, lambda: int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world_size)))
    return machine_ranks(mesh.layout, local)


def build_nodes(mesh: Mesh, size: int, timeout_seconds: float) -> Nodes:
    """Create the groups, which `mesh.close` destroys. `size` divides the degree of `dp_shard`. Collective."""
    ranks, shard = mesh.size("dp_shard"), mesh.group("dp_shard")
    count = ranks // size
    if size == 1 or count == 1:
        return Nodes(count, size, None if size == 1 else shard, None if count == 1 else shard)
    stride = mesh.layout.stride("dp_shard")
    world = torch.arange(mesh.world_size).view(-1, count, size, stride)  # the last three are (node, place, faster axes)
    # The same description as DeviceMesh uses for the axis, which the flight recorder's readers parse.
    inside = _subgroup(world.permute(0, 3, 1, 2).reshape(-1, size))
    across = _subgroup(world.permute(0, 3, 2, 1).reshape(-1, count))
    for group in (inside, across):
        set_timeout(group, timeout_seconds)
        mesh.subgroups.append(group)
    return Nodes(count, size, inside, across)


def _subgroup(lines: torch.Tensor) -> dist.ProcessGroup:
    group, _ = dist.new_subgroups_by_enumeration(lines.tolist(), group_desc="mesh_dp_shard")
    assert isinstance(group, dist.ProcessGroup)
    return group
