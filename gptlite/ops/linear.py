"""Linear layers. Only the gradients of the parameters are ours: on a CPU with AMX torch's take twice as long.

By AVX512-BF16 alone the kernel wins a few percent, and the pass that turns its result into fp32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fused: bool = False) -> Tensor:
    """x weightᵀ + bias, in x's dtype. x [..., in]; weight [out, in]; bias [out]. The kernel is for bf16 alone."""
    if fused and x.dtype == torch.bfloat16:
        return _Linear.apply(x, weight, bias)
    return F.linear(x, weight.to(x.dtype), cast(bias, x.dtype))


def linear_gradients(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, fused: bool) -> tuple[Tensor, Any]:
    """Gradients of weight and bias, rounded to x's dtype and given in theirs. dy [..., out]; x [..., in].

    `bias` None: it has none.
    """
    if fused and x.dtype == torch.bfloat16:
        fp32 = weight.dtype == torch.float32
        dweight, dbias = torch.ops.gptlite.weight_gradient(dy, x, bias is not None, fp32)
        return dweight, None if bias is None else dbias.to(bias.dtype)
    rows = dy.flatten(0, -2)
    dweight = (rows.t() @ x.flatten(0, -2)).to(weight.dtype)
    return dweight, None if bias is None else rows.sum(0).to(bias.dtype)


def cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A bias that may be missing, in a dtype."""
    return None if tensor is None else tensor.to(dtype)


class _Linear(torch.autograd.Function):
    """The cast of the parameters included: the kernel writes their gradients as they want them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        low = weight.to(x.dtype)
        ctx.save_for_backward(x, low)
        ctx.like, ctx.bias_like = weight.new_empty(0), None if bias is None else bias.new_empty(0)
        return F.linear(x, low, cast(bias, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        x, weight = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        return dx, *linear_gradients(dy, x, ctx.like, ctx.bias_like, fused=True)
