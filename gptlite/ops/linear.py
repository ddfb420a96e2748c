"""Linear layers. Only the gradients of the parameters are ours: on a CPU with AMX torch's take twice as long.

By AVX512-BF16 alone the kernel wins a few percent, and the pass that turns its result into fp32. On a GPU the product
is cuBLAS's, told to write fp32: rounding to 16 bits and widening again would be a pass over all gradients.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptlite.ops.config import PRODUCTS
from gptlite.ops.weight_copies import as_dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fused: bool = False) -> Tensor:
    """x weightᵀ + bias, in x's dtype. x [..., in]; weight [out, in]; bias [out].

    `fused`: parameters get their gradients in their own dtype. The CPU kernel is for bf16 alone; on a GPU there is
    nothing to gain unless the weight is an fp32 master.
    """
    if fused and (weight.dtype != x.dtype if PRODUCTS[x.device.type].fp32 else x.dtype == torch.bfloat16):
        return _Linear.apply(x, weight, bias)
    return F.linear(x, as_dtype(weight, x.dtype), cast(bias, x.dtype))


def linear_gradients(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, fused: bool) -> tuple[Tensor, Any]:
    """Gradients of weight and bias, rounded to x's dtype and given in theirs. dy [..., out]; x [..., in].

    `bias` None: it has none. A GPU's are summed in fp32 and rounded once, to theirs.
    """
    on_gpu = PRODUCTS[x.device.type].fp32
    if fused and x.dtype == torch.bfloat16 and not on_gpu:
        fp32 = weight.dtype == torch.float32
        dweight, dbias = torch.ops.gptlite.weight_gradient(dy, x, bias is not None, fp32)
        return dweight, None if bias is None else dbias.to(bias.dtype)
    rows, columns = dy.flatten(0, -2), x.flatten(0, -2)
    if fused and on_gpu:
        dweight = product(rows.t(), columns, weight.dtype)
        return dweight, None if bias is None else rows.sum(0, dtype=bias.dtype)
    dweight = (rows.t() @ columns).to(weight.dtype)
    return dweight, None if bias is None else rows.sum(0).to(bias.dtype)


def product(a: Tensor, b: Tensor, dtype: torch.dtype, onto: Tensor | None = None) -> Tensor:
    """a b in `dtype`, the operands' or fp32, added to `onto`, in its place, if that is given.

    Where a GPU's product is asked for fp32 it writes its sums as they are: one pass less than rounding and widening.
    """
    if a.dtype == dtype:
        return a @ b if onto is None else onto.addmm_(a, b)
    if not PRODUCTS[a.device.type].fp32:
        part = (a @ b).to(dtype)
        return part if onto is None else onto.add_(part)
    if onto is None:
        return torch.mm(a, b, out_dtype=dtype)  # pyright: ignore[reportCallIssue]
    return torch.addmm(onto, a, b, out_dtype=dtype, out=onto)  # pyright: ignore[reportCallIssue]


def cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A bias that may be missing, in a dtype."""
    return None if tensor is None else as_dtype(tensor, dtype)


class _Linear(torch.autograd.Function):
    """The cast of the parameters included: the kernel writes their gradients as they want them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        low = as_dtype(weight, x.dtype)
        ctx.save_for_backward(x, low)
        ctx.like, ctx.bias_like = weight.new_empty(0), None if bias is None else bias.new_empty(0)
        return F.linear(x, low, cast(bias, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        x, weight = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        return dx, *linear_gradients(dy, x, ctx.like, ctx.bias_like, fused=True)
