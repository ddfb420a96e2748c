"""Expert parallelism: data ranks share the experts of a layer, and exchange tokens instead of weights.

Each rank routes its own tokens, sends the rows of each to the rank with its expert, and gets the results back
(GShard, arXiv:2006.16668). No capacity limits an expert, so the numbers of rows are exchanged first. Parameters are
DTensors on a second mesh over the same ranks (torchtitan's design): the gradient of an expert is whole on the rank that
holds it, and is summed only over the data ranks that hold the same expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    """Ranks that share experts, and the experts' mesh."""

    mesh: DeviceMesh

    def __post_init__(self) -> None:
        self.group = self.mesh.get_group(EXPERT)
        self.size = self.mesh[EXPERT].size()

    def cut(self, parameter: Tensor, tensor_dim: int | None) -> nn.Parameter:
        """Return the parameter [E, ...], on the meta device, with this rank's experts, and if `tensor_dim` is given
        with its tensor-parallel shard of that dim."""
        axes: Any = EXPERT if tensor_dim is None else (EXPERT, "tp")
        placements = [Shard(0)] if tensor_dim is None else [Shard(0), Shard(tensor_dim)]
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return nn.Parameter(distribute_tensor(whole, self.mesh[axes], placements, src_data_rank=None))

    def counts(self, sent: Tensor) -> Tensor:
        """Exchange the numbers of rows: int64 [R, e], for each rank and each of its experts. Returns those that arrive
        here, from each rank."""
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=self.group)
        return received

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> tuple[Tensor, list[dist.Work]]:
        """Send the first `sent[0]` rows [N, d] to the first rank, the next to the second. Return the rows that arrive,
        valid once the returned work has been waited for."""
        pending: list[dist.Work] = []
        return _Exchange.apply(rows, self, sent, received, pending), pending


def expert_axis(mesh: Mesh) -> ExpertAxis | None:
    """Return the expert axis of a mesh; None if its degree is 1."""
    return None if mesh.expert_mesh is None else ExpertAxis(mesh.expert_mesh)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, axis: ExpertAxis, sent: list[int], received: list[int], pending: list[dist.Work]
    ) -> Tensor:
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
