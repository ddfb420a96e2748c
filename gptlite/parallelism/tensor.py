"""Tensor parallelism (Megatron-LM) with sequence parallelism.

Sources: Shoeybi et al. 2019, arXiv:1909.08053, and for sequence parallelism Korthikanti et al. 2022, arXiv:2205.05198.

A column-parallel layer holds a slice of the output features, a row-parallel layer a slice of the input features; a pair
of them needs one all-reduce. With sequence parallelism, a reduce-scatter leaves each rank a slice of the sequence, and
the next column-parallel layer all-gathers the slices. The traffic is the same, and the activations between the layers
are sharded too. Sharded parameters are DTensors, so that ZeRO and checkpoints know their global shape; compute uses
local tensors, with the collectives below. Unsharded parameters stay plain tensors. With sequence parallelism, a
rank computes their gradients from only a slice of the sequence, and `sum_sliced_gradients` sums them over the ranks.

Shapes: B sequences of length S, T tensor-parallel ranks, s = S / T, d and f features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from gptlite.parallelism.axes import EXPERT
from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.mesh import Mesh
from gptlite.torch_private.distributed import all_gather_single, reduce_scatter_single


@dataclass
class TensorAxis:
    """Tensor-parallel ranks, which share each layer. All layers of a model hold the same object.

    `sequence`: activations between layers are sharded along the sequence. `overlap`: the backward pass of a
    column-parallel layer computes the weight gradient while the input gradient is being summed over the ranks.
    """

    mesh: DeviceMesh
    sequence: bool
    overlap: bool

    def __post_init__(self) -> None:
        self.group = self.mesh.get_group()
        self.size, self.rank = self.mesh.size(), self.mesh.get_local_rank()

    @contextmanager
    def whole_sequence(self) -> Iterator[None]:
        """Disable sequence parallelism inside the `with` block, for generation, which runs single tokens that cannot be
        split."""
        sequence, self.sequence = self.sequence, False
        try:
            yield
        finally:
            self.sequence = sequence

    def gather_columns(self, x: Tensor, longest: int) -> Tensor:
        """Gather the columns of all ranks' x [B, at most `longest`] on each rank, in rank order. Only the last ranks
        may have fewer than `longest` columns; theirs are padded with zeros."""
        return self.gather(F.pad(x, (0, longest - x.shape[1]))).transpose(0, 1).reshape(len(x), -1)

    def gather(self, x: Tensor) -> Tensor:
        """Gather every rank's x [...] into [T, ...]."""
        return _gather(x, self, wait=True)[0]

    def columns(self, x: Tensor, wanted: Sequence[Sequence[range]]) -> Tensor:
        """Exchange columns between ranks. x [B, S, f / T] has this rank's share of the f columns. Return the g columns
        that this rank needs, [B, S, g].

        `wanted` has the ascending ranges of the columns that each rank needs. Several ranks may need the same column;
        the backward pass sums its gradients.
        """
        share = x.shape[-1]
        held = [range(rank * share, (rank + 1) * share) for rank in range(self.size)]
        sent, received = (
            [_common(held[source], wanted[target]) for source, target in pairs]
            for pairs in (
                [(self.rank, other) for other in range(self.size)],
                [(other, self.rank) for other in range(self.size)],
            )
        )
        return _Columns.apply(x, self, sent, [len(each) for each in received])


def tensor_axis(mesh: Mesh, sequence: bool, overlap: bool) -> TensorAxis | None:
    """Return the tensor axis of a mesh; None if its degree is 1."""
    return TensorAxis(mesh.along("tp"), sequence, overlap) if mesh.size("tp") > 1 else None


def axis_of(part: nn.Module) -> TensorAxis | None:
    """Return the axis over which a part's layers are sharded; None if they are not sharded."""
    axes = (getattr(module, "axis", None) for module in part.modules())
    return next((axis for axis in axes if isinstance(axis, TensorAxis)), None)


def cut(parameter: Tensor, axis: TensorAxis, dim: int) -> nn.Parameter:
    """Shard a parameter along `dim` over the axis, as torch.chunk does, and return it as a DTensor parameter."""
    # src_data_rank=None: every rank has the whole parameter, so nothing is communicated.
    return nn.Parameter(distribute_tensor(parameter.detach(), axis.mesh, [Shard(dim)], src_data_rank=None))


def of_experts(parameter: Tensor) -> bool:
    """Return True if a parameter is sharded over the expert axis, in the experts' mesh."""
    return isinstance(parameter, DTensor) and EXPERT in (parameter.device_mesh.mesh_dim_names or ())


def is_cut(parameter: Tensor) -> bool:
    """Return True if a parameter is sharded over the tensor axis. Other parameters are replicated over it."""
    return isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())


class ColumnParallelLinear(nn.Module):
    """Column-parallel linear layer: x [B, S or s, d] -> [B, S, f / T], this rank's output features.

    x is gathered in the dtype of the matrix multiplication.
    """

    matmul_dtype: torch.dtype | None = None
    multiply = staticmethod(F.linear)  # or an fp8 version

    def __init__(self, whole: nn.Linear, axis: TensorAxis) -> None:
        super().__init__()
        self.axis, self.fused = axis, getattr(whole, "fused", False)
        self.weight = cut(whole.weight, axis, 0)
        self.bias = None if whole.bias is None else cut(whole.bias, axis, 0)

    def forward(self, x: Tensor) -> Tensor:
        out = self.project(x)
        return out if self.bias is None else out + local_tensor(self.bias).to(out.dtype)

    def project(self, x: Tensor) -> Annotated[Tensor, "I -> R"]:
        """Apply the layer without its bias, for an op that adds the bias itself."""
        x = x.to(self.matmul_dtype or x.dtype)
        weight = local_tensor(self.weight).to(x.dtype)
        if self.axis.overlap and self.multiply is F.linear:  # the fp8 version has its own backward pass
            return _OverlappedColumn.apply(x, weight, self.axis)
        return self.multiply(enter(x, self.axis), weight)

    def local_bias(self) -> Tensor | None:
        """Return this rank's shard of the bias."""
        return None if self.bias is None else local_tensor(self.bias)


class RowParallelLinear(nn.Module):
    """Row-parallel linear layer: x [B, S, f / T], this rank's input features, -> [B, S or s, d].

    The partial results are summed in the dtype of the matrix multiplication.
    """

    matmul_dtype: torch.dtype | None = None
    multiply = staticmethod(F.linear)  # or an fp8 version

    def __init__(self, whole: nn.Linear, axis: TensorAxis) -> None:
        super().__init__()
        self.axis, self.fused = axis, getattr(whole, "fused", False)
        self.weight = cut(whole.weight, axis, 1)
        self.bias = whole.bias  # added after the sum over ranks, so every rank holds all of it

    def forward(self, x: Tensor) -> Tensor:
        out = self.project(x)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def project(self, x: Tensor) -> Annotated[Tensor, "P -> I"]:
        """Apply the layer without its bias, for an op that adds the bias itself."""
        x = x.to(self.matmul_dtype or x.dtype)
        return leave(self.multiply(x, local_tensor(self.weight).to(x.dtype)), self.axis)


class VocabParallelEmbedding(nn.Module):
    """Vocabulary-parallel embedding: tokens [B, S] -> [B, S or s, d]. Each rank holds a slice of the rows, whose number
    need not be divisible by T."""

    def __init__(self, whole: nn.Embedding, axis: TensorAxis) -> None:
        super().__init__()
        self.axis = axis
        self.weight = cut(whole.weight, axis, 0)

    def forward(self, tokens: Tensor) -> Annotated[Tensor, "P -> I"]:
        weight = local_tensor(self.weight)
        row = tokens - first_row(self.weight, self.axis)
        mine = (row >= 0) & (row < len(weight))
        # F.embedding rejects an empty table. It stays in the graph, as all ranks join the backward pass of `leave`.
        table = weight if len(weight) else torch.cat((weight, weight.new_zeros(1, weight.shape[1])))
        # Tokens whose rows are on other ranks look up row 0. The factor removes them from the sum, and from row 0's
        # gradient.
        out = F.embedding(row.masked_fill(~mine, 0), table) * mine.unsqueeze(-1)
        return leave(out, self.axis)


def sum_sliced_gradients(parameters: Iterable[Tensor], axis: TensorAxis) -> None:
    """Sum the gradients of unsharded parameters, which each rank has computed from a slice of the sequence, over the
    axis."""
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None and not is_cut(p)]
    if gradients:
        whole = torch.cat([gradient.flatten() for gradient in gradients])  # one collective for all of them
        flat = _sum(whole.to(axis.mesh.device_type), axis)  # an offloaded gradient is on the host
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def first_row(weight: Tensor, axis: TensorAxis) -> int:
    """Return the index of the first row of this rank's shard in the global weight."""
    return min(axis.rank * rows_per_rank(weight, axis), weight.shape[0])


def rows_per_rank(weight: Tensor, axis: TensorAxis) -> int:
    """Return the number of rows of the largest shard. The last shards may be smaller, or empty."""
    return -(-weight.shape[0] // axis.size)


def enter(x: Tensor, axis: TensorAxis) -> Tensor:
    """Return x as the input of column-parallel layers: with sequence parallelism, gathered along the sequence. The
    backward pass sums the gradient over the ranks."""
    return (_Gather if axis.sequence else _Copy).apply(x, axis)


def summed(x: Tensor, axis: TensorAxis) -> Tensor:
    """Sum x over the ranks. Each rank's loss depends on the sum, so the backward pass sums the gradients too."""
    return _Copy.apply(_Sum.apply(x, axis), axis)


def leave(x: Tensor, axis: TensorAxis) -> Tensor:
    """Sum x [B, S, d] over the ranks. Return the sum or, with sequence parallelism, this rank's slice of it."""
    return (_Scatter if axis.sequence else _Sum).apply(x, axis)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: TensorAxis) -> Annotated[Tensor, "I -> R"]:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return _sum(grad.clone(memory_format=torch.contiguous_format), ctx.axis), None  # a copy: the sum is in place


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: TensorAxis) -> Annotated[Tensor, "P -> I"]:
        return _sum(x.clone(memory_format=torch.contiguous_format), axis)  # a copy: autograd may have saved x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: TensorAxis) -> Annotated[Tensor, "S(1) -> R"]:
        ctx.axis = axis
        return _joined(*_gather(x, axis))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return _finished(*_scatter(grad, ctx.axis)), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: TensorAxis) -> Annotated[Tensor, "P -> S(1)"]:
        ctx.axis = axis
        return _finished(*_scatter(x, axis))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return _joined(*_gather(grad, ctx.axis)), None


class _OverlappedColumn(torch.autograd.Function):
    """Linear layer x weightᵀ whose backward pass overlaps communication with computation.

    With sequence parallelism, only a slice of the input is saved, and the backward pass gathers the input again while
    it computes the input gradient. It sums the input gradient over the ranks while it computes the weight gradient.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, axis: TensorAxis) -> Annotated[Tensor, "I -> R"]:
        ctx.axis, ctx.sequence = axis, axis.sequence
        ctx.save_for_backward(x, weight)
        return F.linear(_joined(*_gather(x, axis)) if axis.sequence else x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        gathering = _gather(x, ctx.axis) if ctx.sequence else None
        dx = grad @ weight
        if ctx.sequence:
            out, work = _scatter(dx, ctx.axis)  # runs while dweight is computed below
        else:
            # In place: nothing else refers to dx.
            out, work = dx, dist.all_reduce(dx, group=ctx.axis.group, async_op=True)
        whole = x if gathering is None else _joined(*gathering)
        dweight = grad.flatten(0, -2).t() @ whole.flatten(0, -2)
        return _finished(out, work), dweight, None


class _Columns(torch.autograd.Function):
    """Exchange of columns x [B, S, f / T] -> [B, S, g]. `sent` has the indices of the columns to send to each rank,
    `received` the number of columns to receive from each rank."""

    @staticmethod
    def forward(ctx, x: Tensor, axis: TensorAxis, sent: list, received: list) -> Annotated[Tensor, "S(-1) -> S(-1)"]:
        ctx.axis, ctx.sent, ctx.received, ctx.width = axis, sent, received, x.shape[-1]
        return torch.cat(_exchange([x[..., each] for each in sent], received, axis), -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        parts = _exchange(list(grad.split(ctx.received, -1)), [len(each) for each in ctx.sent], ctx.axis)
        out = grad.new_zeros(*grad.shape[:-1], ctx.width)
        for columns, part in zip(ctx.sent, parts, strict=True):
            out[..., columns] += part
        return out, None, None, None


def _exchange(parts: list[Tensor], widths: list[int], axis: TensorAxis) -> list[Tensor]:
    """Send one part [B, S, any width] to each rank. Return the parts received from each rank, of widths `widths`."""
    rows = parts[0].shape[:-1]
    sent = torch.cat([part.flatten() for part in parts])
    into, out = [rows.numel() * width for width in widths], [part.numel() for part in parts]
    received = sent.new_empty(sum(into))
    dist.all_to_all_single(received, sent, into, out, group=axis.group)
    return [each.view(*rows, width) for each, width in zip(received.split(into), widths, strict=True)]


def _common(held: range, wanted: Sequence[range]) -> list[int]:
    """Return the columns that are in both `held` and `wanted`, as indices relative to the start of `held`."""
    both = (range(max(held.start, each.start), min(held.stop, each.stop)) for each in wanted)
    return [column - held.start for each in both for column in each]


def _sum(x: Tensor, axis: TensorAxis) -> Tensor:
    dist.all_reduce(x, group=axis.group)
    return x


def _gather(x: Tensor, axis: TensorAxis, wait: bool = False) -> tuple[Tensor, dist.Work | None]:
    """Start gathering all ranks' x [B, ...] into [T, B, ...]. Return the output and a work handle; with `wait`, the
    output is complete."""
    x = x.contiguous()
    out = x.new_empty(axis.size * len(x), *x.shape[1:])
    work = all_gather_single(out, x, group=axis.group, async_op=not wait)
    return out.view(axis.size, *x.shape), work


def _joined(parts: Tensor, work: dist.Work | None) -> Tensor:
    """Wait for the gather and reshape [T, B, s, d] -> [B, S, d]."""
    if work is not None:
        work.wait()
    size, batch, length, width = parts.shape
    return parts.transpose(0, 1).reshape(batch, size * length, width)


def _scatter(x: Tensor, axis: TensorAxis) -> tuple[Tensor, dist.Work | None]:
    """Start a reduce-scatter of all ranks' x [B, S, d] into slices [B, s, d]. Return the output and a work handle."""
    batch, length, width = x.shape
    slices = x.view(batch, axis.size, length // axis.size, width).transpose(0, 1).flatten(0, 1).contiguous()
    out = x.new_empty(batch, length // axis.size, width)
    return out, reduce_scatter_single(out, slices, group=axis.group, async_op=True)


def _finished(out: Tensor, work: dist.Work | None) -> Tensor:
    if work is not None:
        work.wait()
    return out
