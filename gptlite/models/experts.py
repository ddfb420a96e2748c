"""Mixture of experts without token dropping: router, experts and load balancing.

All results are defined per token, per sequence or per global batch, never per micro-batch or rank, so that they are the
same on all layouts. Shapes: B sequences of length S (s of it on this rank), hidden size d, E experts, K experts per
token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gptlite.ops.bias_activation import bias_activation
from gptlite.ops.experts import Dispatch, grouped_linear
from gptlite.parallelism.axes import DATA_AXES
from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.collectives import all_reduce
from gptlite.parallelism.context import ContextAxis
from gptlite.parallelism.expert import ExpertAxis, ExpertWeights
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.tensor import TensorAxis, axis_of, cut, enter, leave
from gptlite.torch_private.dispatch import has_values


class Router(nn.Module):
    """Router that selects K experts for each token: x [B, s, d] -> weights fp32 and expert indices int64, both [B, s,
    K]. Samples with a negative number are fillers, which no load or loss counts.

    Logits and scores are fp32. `bias` [E] is added to the scores to select experts, but not to compute their weights.
    The backward pass adds the number of tokens of each expert to `load` [E] and the router's losses to `losses`; the
    forward pass does not, since it may be recomputed. At the end of a step, both hold the sums over all ranks.
    """

    bias: Tensor
    load: Tensor
    losses: Tensor
    compiles = False  # it counts loads, with which it would be compiled again

    def __init__(
        self, width: int, experts: int, top_k: int, *, sigmoid: bool, renormalize: bool, bias_rate: float
    ) -> None:
        super().__init__()
        self.top_k, self.sigmoid, self.renormalize, self.bias_rate = top_k, sigmoid, renormalize, bias_rate
        self.sequence_loss = self.z_loss = 0.0
        self.tensor_axis: TensorAxis | None = None
        self.context: ContextAxis | None = None
        self.upstream: Tensor | None = None  # gradient with respect to the sum of losses; None outside training
        self.weight = _drawn(experts, width)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts, dtype=torch.int64), persistent=False)
        self.register_buffer("losses", torch.zeros((), dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor, sample_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        # The weight is rounded to the activations' dtype, in which ZeRO gathers it; the GEMM runs in fp32.
        logits = F.linear(x.float(), self.weight.to(x.dtype).float())
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        # Of equal scores, a stable sort puts the lower index first; topk may choose any.
        ranked = (scores.detach() + self.bias).sort(dim=-1, descending=True, stable=True).indices
        chosen = ranked[..., : self.top_k]
        weights = scores.gather(-1, chosen)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.training and weights.requires_grad:
            samples = chosen.new_ones(len(x), 1) if sample_ids is None else (sample_ids >= 0).long()[:, None]
            weights = _Counted.apply(weights, self._losses(logits, scores, chosen, samples), chosen, samples, self)
        return weights, chosen

    def _losses(self, logits: Tensor, scores: Tensor, chosen: Tensor, samples: Tensor) -> Tensor:
        """Return this rank's share of the router's losses, summed over tokens. `samples` [B, 1] is 0 for fillers."""
        total = logits.new_zeros(())
        if self.z_loss:
            total = total + self.z_loss * (samples * logits.logsumexp(-1).square()).sum()
        if self.sequence_loss:
            counts = torch.zeros_like(scores).scatter_(-1, chosen, 1.0).sum(1)  # [B, E]
            length = scores.shape[1]
            for group, size in self._sequence_groups():
                dist.all_reduce(counts, group=group)
                length *= size
            shares = counts * scores.shape[-1] / (self.top_k * length)  # 1 for equal loads
            shares = shares * samples
            total = total + self.sequence_loss * (shares * (scores / scores.sum(-1, keepdim=True)).sum(1)).sum()
        return total

    def _sequence_groups(self) -> list[tuple[dist.ProcessGroup, int]]:
        """Return the process groups over whose ranks each sequence is sharded, with the sizes of the groups."""
        tensor, context = self.tensor_axis, self.context
        found = [] if tensor is None or not tensor.sequence else [(tensor.group, tensor.size)]
        return found if context is None or context.whole else [*found, (context.group, context.size)]


class _Counted(torch.autograd.Function):
    """Identity function of the routing weights of the chosen experts. Its backward pass also adds to `router.load` and
    `router.losses`, and returns `router.upstream` as the gradient with respect to the losses."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, losses: Tensor, chosen: Tensor, samples: Tensor, router: Router) -> Tensor:
        ctx.save_for_backward(chosen, losses, samples)
        ctx.router = router
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        chosen, losses, samples = ctx.saved_tensors
        router: Router = ctx.router
        router.load.scatter_add_(0, chosen.flatten(), samples[..., None].expand_as(chosen).flatten())
        router.losses += losses
        upstream = torch.zeros_like(losses) if router.upstream is None else router.upstream.to(losses)
        return grad, upstream, None, None, None


class Experts(ExpertWeights):
    """Experts of a layer: x [B, s, d], weights and expert indices `chosen` [B, s, K] -> the weighted sum of the
    experts' outputs.

    `up` [E, u, d] and `down` [E, d, f] are the experts' stacked matrices, with f hidden units; u is f, or 2f with a
    gated activation. Rows 2i and 2i + 1 of an expert's gated `up` are the gate and the value of hidden unit i, as in
    the dense MLP. A tensor-parallel rank holds some hidden units of every expert.
    """

    imbalance = 1.0  # assumed ratio of received to sent rows in the planner, where tensors have no values

    def __init__(self, experts: int, width: int, up: int, hidden: int, activation: str, *, fused: bool) -> None:
        super().__init__()
        self.axis: TensorAxis | None = None
        self.shared_by: ExpertAxis | None = None
        self.activation, self.fused = activation, fused
        self.up, self.down = _drawn(experts, up, width), _drawn(experts, width, hidden)

    def cut_(self, axis: TensorAxis) -> Experts:
        """Keep only this rank's hidden units, and return the module."""
        self.axis, self.up, self.down = axis, cut(self.up, axis, 1), cut(self.down, axis, 2)
        return self

    def share_(self, axis: ExpertAxis) -> None:
        dims = (None, None) if self.axis is None else (1, 2)
        self.shared_by, self.up, self.down = axis, axis.cut(self.up, dims[0]), axis.cut(self.down, dims[1])

    def forward(
        self, x: Tensor, weights: Tensor, chosen: Tensor, beside: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return the weighted sum of the experts' outputs, plus `beside(x)` if given. With expert parallelism, `beside`
        is computed during the first all-to-all exchange."""
        dtype, original = x.dtype, x
        x = x.to(self.matmul_dtype or dtype)
        if self.axis is not None:
            # Each rank computes a partial sum of every output, so the gradients of x and of the routing weights are
            # summed over the ranks.
            x, weights, chosen = (enter(each, self.axis) for each in (x, weights, chosen))
        dispatch = Dispatch.of(chosen.flatten(0, 1), self.up.shape[0])
        rows = dispatch.rows(x.flatten(0, 1))
        if self.shared_by is None:
            rows, added = self._outputs(rows, dispatch.ends), beside and beside(original)
        else:
            sent, received, arrived = self._sizes(dispatch, self.shared_by)
            rows, pending = self.shared_by.exchange(rows, sent, received)
            added = beside and beside(original)
            _wait(pending)
            mine = Dispatch.of(arrived.unsqueeze(1), self.up.shape[0] // self.shared_by.size)
            rows = mine.choices(self._outputs(mine.rows(rows), mine.ends))
            rows, pending = self.shared_by.exchange(rows, received, sent)
            _wait(pending)
        out = dispatch.combined(rows, weights)
        out = (out if self.axis is None else leave(out, self.axis)).to(dtype)
        return out if added is None else out + added

    def _outputs(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return the experts' outputs for rows sorted by expert."""
        hidden = grouped_linear(rows, local_tensor(self.up), ends, fp8=self.fp8)
        hidden = bias_activation(hidden, None, self.activation, self.fused)
        return grouped_linear(hidden, local_tensor(self.down), ends, fp8=self.fp8)

    def _sizes(self, dispatch: Dispatch, axis: ExpertAxis) -> tuple[list[int], list[int], Tensor]:
        """Return the number of rows to send to each rank, the number to receive from each rank, and the local expert
        index of each received row."""
        counts = dispatch.ends.long().diff(prepend=dispatch.ends.new_zeros(1)).view(axis.size, -1)
        arriving = axis.counts(counts)
        if not has_values(counts):  # in the planner
            rows = len(dispatch.order)
            arrived = counts.new_empty(round(self.imbalance * rows))
            return _even(rows, axis.size), _even(len(arrived), axis.size), arrived
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        experts = torch.arange(counts.shape[1], device=counts.device).repeat(axis.size)
        return sent, received, experts.repeat_interleave(arriving.flatten(), output_size=sum(received))


def _even(rows: int, ranks: int) -> list[int]:
    """Split a number of rows evenly over the ranks. If there is a remainder, the first ranks get one more row each."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


def _wait(pending: list[dist.Work]) -> None:
    for work in pending:
        work.wait()


def _drawn(*shape: int) -> nn.Parameter:
    """Return a random parameter with standard deviation 1 / sqrt(fan-in), for using the module outside a training
    run."""
    return nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5)


def routers(part: nn.Module) -> list[Router]:
    """Return the routers of a part, in order."""
    return [module for module in part.modules() if isinstance(module, Router)]


def begin(parts: Sequence[nn.Module], upstream: Tensor) -> None:
    """Prepare the routers for a step. `upstream`: gradient with respect to the sum of losses, a scalar tensor."""
    for router in (router for part in parts for router in routers(part)):
        router.upstream = upstream
        router.load.zero_()
        router.losses.zero_()


@torch.no_grad()
def balance(parts: Sequence[nn.Module], mesh: Mesh) -> None:
    """Sum the step's loads and losses over the ranks. Then raise the routers' biases of underloaded experts and lower
    those of overloaded experts. Collective.

    Loads are integers, so the biases are bitwise identical on all layouts.
    """
    for part in parts:
        part_routers = routers(part)
        if not part_routers:
            continue
        # fp64 represents the loads exactly, so that one collective can sum both loads and losses.
        sums = torch.stack([torch.cat([router.load.double(), router.losses[None]]) for router in part_routers])
        all_reduce(sums, mesh, DATA_AXES)
        axis = axis_of(part)
        if axis is not None and axis.sequence:
            dist.all_reduce(sums, group=axis.group)
        for router, losses, load in zip(part_routers, sums[:, -1], sums[:, :-1].long(), strict=True):
            router.bias += router.bias_rate * (load.sum() - load * len(load)).sign()
            router.load.copy_(load)
            router.losses.copy_(losses)


@torch.no_grad()
def loads_of(local_routers: Mapping[int, Router], shape: tuple[int, int], mesh: Mesh) -> Tensor:
    """Return the step's loads and losses of all routers, fp64 [layers with experts, E + 1]; the last column has the
    losses, summed over tokens. Collective.

    `local_routers`: this rank's routers by index among the layers with experts. `shape`: the number of all such layers,
    and E.
    """
    table = torch.zeros(shape[0], shape[1] + 1, dtype=torch.float64, device=mesh.device)
    for row, router in local_routers.items():
        table[row] = torch.cat([router.load.double(), router.losses[None]])
    return all_reduce(table, mesh, ("pp",))
