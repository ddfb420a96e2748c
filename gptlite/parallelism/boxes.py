"""Which box of a whole tensor a rank holds."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Box = tuple[tuple[int, ...], tuple[int, ...]]


def local_box(tensor: Tensor) -> Box:
    """Shape and global offset of this rank's elements; of a plain tensor, all of them. An empty box starts at the end.

    FSDP2 cuts what the tensor axis has cut before it, each as torch.chunk does, and says so by a placement with a
    `split_factor`. torch's own arithmetic for it is wrong where the tensor axis cuts unevenly (seen in 2.11 and 2.13:
    50,257 rows over 2 x 8 ranks).
    """
    shape, offset = list(tensor.shape), [0] * tensor.dim()
    if not isinstance(tensor, DTensor):
        return tuple(shape), tuple(offset)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this rank is not in the tensor's mesh: it holds no box of it")
    axes = [axis for axis, placement in enumerate(tensor.placements) if hasattr(placement, "dim")]
    for axis in sorted(axes, key=lambda axis: hasattr(tensor.placements[axis], "split_factor")):
        dim = tensor.placements[axis].dim  # type: ignore[attr-defined]
        longest = -(-shape[dim] // mesh.size(axis))
        start = min(coordinate[axis] * longest, shape[dim])
        shape[dim] = min(longest, shape[dim] - start)
        offset[dim] += start
    for dim, size in enumerate(shape):
        if size == 0:
            offset[dim] = tensor.shape[dim]
    return tuple(shape), tuple(offset)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's elements, in the tensor's own memory and without its history."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def num_local_elements(tensor: Tensor) -> int:
    """How many elements this rank holds."""
    return torch.Size(local_box(tensor)[0]).numel()
