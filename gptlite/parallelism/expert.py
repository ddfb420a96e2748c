"""Expert parallelism: the experts of a layer are divided among data ranks, which exchange tokens instead of weights.

Each rank routes its own tokens, sends each token's activations (a row) to the ranks that hold the token's experts, and
receives the results (GShard, arXiv:2006.16668). Experts have no capacity limit, so the ranks first exchange the numbers
of rows. Parameters are DTensors on a second mesh over the same ranks (torchtitan's design). An expert's gradient is
computed from the tokens of all expert-parallel ranks, and summed only over the data ranks that hold the same expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from gptlite.parallelism.axes import EXPERT
from gptlite.parallelism.mesh import Mesh


@dataclass
class ExpertAxis:
    """Expert-parallel ranks, among which the experts of each layer are divided. `mesh` is the experts' mesh."""

    mesh: DeviceMesh

    def __post_init__(self) -> None:
        self.group = self.mesh.get_group(EXPERT)
        self.size = self.mesh[EXPERT].size()

    def cut(self, parameter: Tensor, tensor_dim: int | None) -> nn.Parameter:
        """Return a parameter [E, ...] on the meta device, sharded along its first dim over the expert axis and, if
        `tensor_dim` is given, along that dim over the tensor axis."""
        axes: Any = EXPERT if tensor_dim is None else (EXPERT, "tp")
        placements = [Shard(0)] if tensor_dim is None else [Shard(0), Shard(tensor_dim)]
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return nn.Parameter(distribute_tensor(whole, self.mesh[axes], placements, src_data_rank=None))

    def counts(self, sent: Tensor) -> Tensor:
        """Exchange the numbers of rows. `sent`, int64 [R, e], has the number of rows for each of the e experts of each
        of the R ranks. Return the numbers of rows that this rank will receive from each rank for its experts [R, e]."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=self.group)
        return received

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> tuple[Tensor, list[dist.Work]]:
        """Start an all-to-all of rows [N, d]: the first `sent[0]` go to the first rank, the next `sent[1]` to the
        second, and so on. Return the received rows, which are valid after waiting for the returned work handles."""
        pending: list[dist.Work] = []
        return _Exchange.apply(rows, self, sent, received, pending), pending


class ExpertWeights(nn.Module):
    """Base class of a layer whose parameters [E, ...] are stacked by expert. Each rank of the expert axis holds the
    parameters of some experts. GEMMs run in `matmul_dtype` if set, or with `fp8` in fp8.

    The layer is left out of compiled blocks: it reads numbers of rows, with which it would be compiled again.
    """

    matmul_dtype: torch.dtype | None = None
    fp8 = False
    compiles = False

    def share_(self, axis: ExpertAxis) -> None:
        """Keep only this rank's experts. Called on the meta device, after the layer has been sharded over the tensor
        axis."""
        raise NotImplementedError


def expert_axis(mesh: Mesh) -> ExpertAxis | None:
    """Return the expert axis of a mesh; None if its degree is 1."""
    return None if mesh.expert_mesh is None else ExpertAxis(mesh.expert_mesh)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, axis: ExpertAxis, sent: list[int], received: list[int], pending: list[dist.Work]
    ) -> Annotated[Tensor, "S(0) -> S(0)"]:
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        out = rows.new_empty(sum(received), rows.shape[1])
        work = dist.all_to_all_single(out, rows.contiguous(), received, sent, group=axis.group, async_op=True)
        assert work is not None
        pending.append(work)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        out = grad.new_empty(sum(ctx.sent), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), ctx.sent, ctx.received, group=ctx.axis.group)
        return out, None, None, None, None
