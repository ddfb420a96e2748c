"""Device mesh of a run. All code that communicates with other ranks receives a `Mesh`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gptlite.parallelism.axes import AXES, EXPERT, EXPERT_AXES, EXPERT_DATA_AXES, Alike, alike, folded
from gptlite.parallelism.config import Offload, ParallelismConfig
from gptlite.parallelism.layout import Layout, resolve
from gptlite.parallelism.process_group import join_alone, leave_group
from gptlite.parallelism.reduction import Reduction
from gptlite.torch_private.distributed import forget_meshes, set_timeout


@dataclass(frozen=True)
class Mesh:
    """Axis degrees, this rank's coordinates, and the process groups along the axes.

    With one rank, no process group exists and `device_mesh` is None, unless model state is offloaded, for which FSDP2
    needs a group. `folded_groups` maps the name of each folded axis with more than one rank to its group. `expert_mesh`
    has the dimensions EXPERT_AXES; it is None if the expert degree is 1. `reduction` replaces FSDP2's sums of gradients
    over the data axes, unless it is None; `subgroups` are further groups of its own, which `close` destroys.
    """

    device: torch.device
    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    device_mesh: DeviceMesh | None = None
    # A dict is not hashable.
    folded_groups: dict[str, dist.ProcessGroup] = field(default_factory=dict, hash=False)
    expert_mesh: DeviceMesh | None = None
    reduction: Reduction | None = field(default=None, hash=False, compare=False)
    subgroups: list[dist.ProcessGroup] = field(default_factory=list, hash=False, compare=False)

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of the axes' sizes."""
        return self.layout.world_size

    def size(self, axis: str) -> int:
        """Return the degree of an axis."""
        return self.layout.size(axis)

    def coordinate(self, axis: str) -> int:
        """Return this rank's index along an axis."""
        return self.layout.coordinate(self.rank, axis)

    def is_first(self, parameters: Alike) -> bool:
        """Return True if this rank is the first along every axis over which this kind of parameters is replicated.

        If all replicas compute a loss or a gradient, it is counted only where this is True.
        """
        return all(self.coordinate(axis) == 0 for axis in alike(parameters))

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of this rank along an axis. Raises ValueError on one device, which has none."""
        if axis in self.folded_groups:
            return self.folded_groups[axis]
        if self.device_mesh is None:
            raise ValueError(f"a single device has no group along {axis}")
        return self.device_mesh.get_group(axis)  # a sub-mesh, as `along` creates, takes 0.3 ms

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """Return the process groups of the axes that have more than one rank, the folded axes last."""
        return {axis: self.group(axis) for axis in AXES if self.size(axis) > 1} | self.folded_groups

    def expert_groups(self) -> dict[str, dist.ProcessGroup]:
        """Return the process groups of those data axes of the experts' mesh that have more than one rank."""
        if self.expert_mesh is None:
            return {}
        return {axis: self.expert_mesh.get_group(axis) for axis in EXPERT_DATA_AXES if self.size(axis) > 1}

    def all_groups(self) -> list[dist.ProcessGroup]:
        """Return all process groups of the mesh, including groups of one rank. Raises ValueError on one device."""
        experts = [] if self.expert_mesh is None else [self.expert_mesh.get_group(axis) for axis in EXPERT_AXES]
        return [*map(self.group, AXES), *self.folded_groups.values(), *experts, *self.subgroups]

    def along(self, *axes: str) -> DeviceMesh:
        """Return this rank's sub-mesh along some axes. Raises ValueError on one device."""
        if self.device_mesh is None:
            raise ValueError(f"a single device has no mesh along {', '.join(axes)}")
        if len(axes) == 1:
            (axis,) = axes
            return self.device_mesh[axis]
        return self.device_mesh[axes]

    @property
    def data_size(self) -> int:
        """Number of data-parallel parts of a global batch."""
        return self.layout.data_size

    @property
    def fsdp_size(self) -> int:
        """Number of ranks whose gradients are summed: data_size times the context-parallel degree."""
        return self.layout.fsdp_size

    @property
    def data_rank(self) -> int:
        """Index of the part of the global batch that this rank reads."""
        return self.layout.data_rank(self.rank)

    @property
    def is_main(self) -> bool:
        """True if this rank writes files and prints to the terminal."""
        return self.rank == 0

    def close(self) -> None:
        """Destroy the mesh's process groups, which hold file descriptors. The world group is destroyed only if there is
        just one rank."""
        if self.device_mesh is None:
            return
        groups = {id(group): group for group in self.all_groups()}
        for group in groups.values():
            if group is not dist.group.WORLD:  # an axis over all ranks has the world group
                dist.destroy_process_group(group)
        forget_meshes()  # DTensor's cache would return meshes whose groups are destroyed
        if self.world_size == 1:
            leave_group()


def build_mesh(config: ParallelismConfig) -> Mesh:
    """Build the mesh over the ranks of the process group, or over one device if no process group has been joined.

    With offload on a single device, this joins a process group of one rank, which `close` leaves. Raises ConfigError if
    the degrees do not fit the number of ranks.
    """
    cuda = torch.cuda.is_available()
    if not dist.is_initialized() and config.offload is not Offload.none:
        join_alone(config.timeout_seconds)
    if not dist.is_initialized():
        device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        return Mesh(device, resolve(config, 1))
    rank, layout = dist.get_rank(), resolve(config, dist.get_world_size())
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    mesh = mesh_over_world(device, layout, rank)
    for group in mesh.all_groups():  # torch's defaults are 10 minutes (NCCL) and 30 minutes (gloo)
        set_timeout(group, config.timeout_seconds)
    return mesh


def mesh_over_world(device: torch.device, layout: Layout, rank: int) -> Mesh:
    """Create a mesh of all ranks and its process groups. Collective."""
    ranks = torch.arange(layout.world_size)
    # Axes of one rank are included, so that every axis has a name and a group.
    device_mesh = DeviceMesh(device.type, ranks.view(layout.sizes), mesh_dim_names=AXES)
    groups = {}
    experts = None
    if layout.size(EXPERT) > 1:
        experts = DeviceMesh(device.type, ranks.view(layout.expert_sizes), mesh_dim_names=EXPERT_AXES)
        groups[EXPERT] = experts.get_group(EXPERT)
    for axis in (axis.name for axis in folded() if layout.size(axis.name) > 1 and axis.name not in groups):
        lines = ranks.view(-1, layout.size(axis), layout.stride(axis)).transpose(1, 2).flatten(0, 1).tolist()
        # The same description as DeviceMesh uses; flight_recorder.axis_of parses it.
        # Collective: every rank creates the groups of all lines, in the same order.
        groups[axis], _ = dist.new_subgroups_by_enumeration(lines, group_desc=f"mesh_{axis}")
    return Mesh(device, layout, rank, device_mesh, groups, experts)
