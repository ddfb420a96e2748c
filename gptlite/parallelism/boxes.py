"""Shape and offset of the local shard of a sharded tensor."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class ShardedDim:
    """Sharding of one tensor dimension over one mesh axis, split as by torch.chunk. `size` is the number of ranks along
    the axis, and `rank` is this rank's index. `dim` is -1 for an axis whose ranks hold copies."""

    axis: str
    dim: int
    size: int
    rank: int
    mesh: DeviceMesh

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of this rank along the axis."""
        return self.mesh.get_group(self.axis)

    @property
    def device(self) -> torch.device:
        """Device of the tensors that the axis's ranks communicate. Offloaded tensors are on another device."""
        return torch.device(self.mesh.device_type)

    def lengths(self, length: int) -> list[int]:
        """Return the length of each rank's chunk of a dimension of length `length`."""
        longest = -(-length // self.size)  # torch.chunk rounds up, so the last ranks may have less, or nothing
        return [min(longest, max(0, length - rank * longest)) for rank in range(self.size)]


def cuts(tensor: Tensor) -> list[ShardedDim]:
    """Return the shardings of a tensor over more than one rank, in the order in which they apply. The list is empty for
    a plain tensor.

    FSDP2 shards tensor-parallel shards further, and marks this by a placement with a `split_factor`.
    """
    # Placements with a split_factor apply last, though their mesh axis comes first.
    return [cut for _, cut in sorted(_axes(tensor), key=lambda pair: pair[0]) if cut.dim >= 0]


def copies(tensor: Tensor) -> list[ShardedDim]:
    """Return the axes along which several ranks hold the same elements of a tensor. The list is empty for a plain
    tensor."""
    return [cut for _, cut in _axes(tensor) if cut.dim < 0]


def _axes(tensor: Tensor) -> list[tuple[bool, ShardedDim]]:
    """Return those axes of a tensor's mesh that have more than one rank, each paired with True if its placement applies
    last."""
    if not isinstance(tensor, DTensor):
        return []
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this rank is not in the tensor's mesh, so it holds no shard")
    names = mesh.mesh_dim_names or [str(axis) for axis in range(mesh.ndim)]
    return [
        (
            hasattr(placement, "split_factor"),
            ShardedDim(names[i], getattr(placement, "dim", -1), mesh.size(i), at, mesh),
        )
        for i, (placement, at) in enumerate(zip(tensor.placements, coordinate, strict=True))
        if mesh.size(i) > 1
    ]


def local_box(tensor: Tensor) -> Box:
    """Return the box of this rank's shard: its shape, and its offset in the whole tensor. A plain tensor is one box at
    offset 0.

    Along a dimension in which the shard is empty, the offset is the length of the whole tensor. torch's own computation
    is wrong if the tensor-parallel axis shards unevenly (seen in 2.11 and 2.13: 50,257 rows over 2 x 8 ranks).
    """
    shape, offset = list(tensor.shape), [0] * tensor.dim()
    for cut in cuts(tensor):
        start = min(cut.rank * -(-shape[cut.dim] // cut.size), shape[cut.dim])
        shape[cut.dim] = cut.lengths(shape[cut.dim])[cut.rank]
        offset[cut.dim] += start
    for dim, size in enumerate(shape):
        if size == 0:
            offset[dim] = tensor.shape[dim]
    return tuple(shape), tuple(offset)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's elements of a tensor, sharing its memory, in the shape of its `local_box`. Gradients flow back
    to the tensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    # FSDP2's shards of an empty tensor-parallel shard have 0 rows, whatever their box is.
    return local if local.numel() else local.view(local_box(tensor)[0])


def cut_like(parameter: Tensor, local: Tensor) -> Tensor:
    """Wrap a local tensor as a DTensor that is sharded like `parameter`."""
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
    # Without `shape`, torch would assume shards of equal size.
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=parameter.stride())


def num_local_elements(tensor: Tensor) -> int:
    """Return the number of elements of a tensor on this rank."""
    return torch.Size(local_box(tensor)[0]).numel()
