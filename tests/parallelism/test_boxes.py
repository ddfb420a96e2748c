"""Where a rank's elements lie in the whole, against torch.chunk, for every rank of meshes that need no processes.

That FSDP2 cuts as it is taken to here, tests/distributed/test_checkpoint_ranks.py shows.
"""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from gptlite.parallelism.boxes import local_box, local_tensor, num_local_elements
from gptlite.torch_private.simulation import imagined_world


def piece(tensor: Tensor, dim: int, count: int, index: int) -> Tensor:
    """What torch.chunk gives one of `count` ranks; the last may get nothing."""
    pieces = tensor.chunk(count, dim)
    return pieces[index] if index < len(pieces) else tensor.narrow(dim, 0, 0)


@pytest.mark.parametrize(
    ("rows", "copies", "data", "tensor", "dim"),
    [(50257, 1, 8, 2, 0), (9, 1, 4, 2, 0), (13, 1, 3, 2, 0), (19, 2, 2, 4, 0), (3, 1, 4, 2, 0), (10, 1, 3, 2, 1)],
)
def test_the_box_is_what_fsdp_holds_of_what_the_tensor_axis_holds(rows, copies, data, tensor, dim):
    whole = torch.arange(rows * 4.0).view(rows, 4)
    covered = torch.zeros(rows, 4)
    sharded = _StridedShard(0, split_factor=tensor) if dim == 0 else Shard(0)
    for rank in range(copies * data * tensor):
        with imagined_world(rank, copies * data * tensor):
            ranks = torch.arange(copies * data * tensor).view(copies, data, tensor)
            part = piece(piece(whole, dim, tensor, rank % tensor), 0, data, rank // tensor % data)
            mesh, placements = DeviceMesh("cpu", ranks), [Replicate(), sharded, Shard(dim)]
            like = {"shape": whole.shape, "stride": whole.stride()}
            weight = DTensor.from_local(part, mesh, placements, run_check=False, **like)
            (height, width), (row, column) = local_box(weight)
            assert part.shape == (height, width)
            assert num_local_elements(weight) == part.numel()
            assert local_tensor(weight).data_ptr() == part.data_ptr()
            assert torch.equal(part, whole[row : row + height, column : column + width])
            covered[row : row + height, column : column + width] += 1
    assert (covered == copies).all()


def test_a_plain_tensor_is_all_of_itself():
    assert local_box(torch.zeros(3, 2)) == ((3, 2), (0, 0))
    assert local_box(torch.zeros(())) == ((), ())
