"""Linear layers of experts: rows are sorted by expert, and each row is multiplied by the weight of its expert.

Shapes: T tokens, each with K chosen experts; N = T K rows, sorted by expert; E experts; `ends` int32 [E], the end of
each expert's rows. Except in `_groups`, the host does not read tensor values, and so does not wait for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from gptlite.ops.weight_copies import as_dtype

ALIGNMENT = 16  # bytes: torch's grouped products take only strides that are multiples of this


@dataclass(frozen=True)
class Dispatch:
    """Order by expert of the T K choices in `chosen`, int64 [T, K]. Choices of the same expert stay in token order.

    `order` [N]: the index of each row's choice; `place` [N]: the row of each choice.
    """

    order: Tensor
    place: Tensor
    ends: Tensor
    top_k: int

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> Dispatch:
        """Sort the choices by expert."""
        flat = chosen.flatten()
        ranked, order = flat.sort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        ends = torch.searchsorted(ranked, torch.arange(experts, device=order.device), right=True, out_int32=True)
        return cls(order, place, ends, chosen.shape[-1])

    def rows(self, x: Tensor) -> Tensor:
        """Return the rows [N, d] of tokens x [T, d]."""
        return _Rows.apply(x, self)

    def choices(self, rows: Tensor) -> Tensor:
        """Return the rows [N, d] in the order of the choices."""
        return _Choices.apply(rows, self)

    def combined(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return each token's sum [..., d] of its rows [N, d], with fp32 `weights` [..., K]. The sum is in fp32, in the
        order of the choices."""
        choices = self.choices(rows).unflatten(0, weights.shape)
        return (choices * weights.unsqueeze(-1)).sum(-2).to(rows.dtype)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, fused: bool = True, fp8: bool = False) -> Tensor:
    """Multiply each row of x [N, in] by the transposed weight [out, in] of its expert. Return [N, out] in x's dtype.

    `fused`: grouped GEMMs; otherwise the reference, a loop over the experts under autograd. `fp8`: the GEMMs run in
    fp8, with one scale for the rows of an expert and one for its weight.
    """
    weight = as_dtype(weight, x.dtype)
    if fused:
        return _GroupedLinear.apply(x, weight, ends, fp8)
    linear = F.linear
    if fp8:
        from gptlite.ops.fp8 import fp8_linear as linear
    groups = [(rows, each) for rows, each in zip(_groups(ends), weight, strict=True) if rows.start < rows.stop]
    return torch.cat([linear(x[rows], each) for rows, each in groups])


def _groups(ends: Tensor) -> list[slice]:
    """Return the rows of each expert. The host waits for `ends`."""
    stops = ends.tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, fp8: bool) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.fp8 = torch.float8_e5m2 if fp8 else None
        return grouped_product(x, weight.mT, ends, torch.float8_e4m3fn if fp8 else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        x, weight, ends = ctx.saved_tensors
        dy = dy.contiguous()
        dx = grouped_product(dy, weight, ends, ctx.fp8) if ctx.needs_input_grad[0] else None
        dweight = grouped_product(dy.t(), x, ends, ctx.fp8) if ctx.needs_input_grad[1] else None
        return dx, dweight, None, None


# A custom op, since torch's grouped_mm has no formula for FLOPs and runs on the meta device only in bf16. The namespace
# is not that of the kernels' library.
@torch.library.custom_op("gptlite_experts::grouped_product", mutates_args=())
def grouped_product(a: Tensor, b: Tensor, ends: Tensor, fp8: torch.dtype | None = None) -> Tensor:
    """Return the matrix products of consecutive groups, which end at `ends`: the rows of a [N, k] times b [E, k, m],
    giving [N, m]; or the columns of a [n, N] times the rows of b [N, m], giving [E, n, m].

    `fp8`: multiply in fp8, with a in this format. In fp8, for which torch has no suitable grouped GEMM, and in 16 bits
    on a CPU, the groups are multiplied in a loop.
    """
    if not a.numel():  # no expert has rows
        return _grouped_shape(a, b, ends).zero_()
    if fp8 is not None:
        return _fp8_groups(a, b, ends, fp8)
    if a.device.type == "cpu" and a.element_size() == 2 and b.ndim == 3:
        return _rows_in_eights(a, b, ends)
    if a.dtype != torch.float64 and _aligned(a) and _aligned(b):
        return F.grouped_mm(a, b, offs=ends)
    if b.ndim == 3:
        return torch.cat([a[rows] @ each for rows, each in zip(_groups(ends), b, strict=True)])
    return torch.stack([a[:, rows] @ b[rows] for rows in _groups(ends)])


def _fp8_groups(a: Tensor, b: Tensor, ends: Tensor, fp8: torch.dtype) -> Tensor:
    """Return grouped_product in fp8, in a loop, since torch's grouped GEMM has no scale for a whole group."""
    from gptlite.ops.fp8 import fp8_product

    out = _grouped_shape(a, b, ends).zero_()
    for index, rows in enumerate(_groups(ends)):
        if rows.start == rows.stop:
            continue
        if b.ndim == 3:
            out[rows] = fp8_product(a[rows], b[index], fp8)
        else:
            out[index] = fp8_product(a[:, rows], b[rows], fp8)
    return out


def _rows_in_eights(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return the products of the rows of a [N, k] with b [E, k, m].

    oneDNN's GEMM takes up to 1.8 times as long for a number of rows that is not a multiple of 8. Each product therefore
    includes up to 7 rows of the next groups, whose own products overwrite the surplus.
    """
    out = _grouped_shape(a, b, ends)
    for rows, each in zip(_groups(ends), b, strict=True):
        if count := rows.stop - rows.start:
            rounded = slice(rows.start, rows.start + -(-count // 8) * 8)
            torch.mm(a[rounded], each, out=out[rounded])
    return out


def _aligned(tensor: Tensor) -> bool:
    return all(step * tensor.element_size() % ALIGNMENT == 0 for step in tensor.stride() if step != 1)


def _grouped_shape(a: Tensor, b: Tensor, ends: Tensor, fp8: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized tensor of the products' shape."""
    if b.ndim == 3:
        return a.new_empty(a.shape[0], b.shape[2])
    return a.new_empty(len(ends), a.shape[0], b.shape[1])


grouped_product.register_fake(_grouped_shape)


@register_flop_formula(torch.ops.gptlite_experts.grouped_product)
def _grouped_flops(a: Any, b: Any, ends: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * a[0] * a[1] * b[-1]


class _Rows(torch.autograd.Function):
    """Rows [N, d] of tokens [T, d]. The backward pass sums a token's gradients in the order of its choices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return x[dispatch.order // dispatch.top_k]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        return grad[ctx.dispatch.place].unflatten(0, (-1, ctx.dispatch.top_k)).sum(1), None


class _Choices(torch.autograd.Function):
    """Rows [N, d] in the order of the choices. The backward pass is a gather too, not an atomic sum."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return rows[dispatch.place]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        return grad[ctx.dispatch.order], None
