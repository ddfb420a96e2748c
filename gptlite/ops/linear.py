"""Linear layers that compute their parameter gradients themselves: on a CPU with AMX, torch takes twice as long.

With AVX512-BF16 alone, the kernel is a few percent faster, and saves the pass that converts its result to fp32. On a
GPU, the cuBLAS GEMM writes fp32. Rounding to 16 bits and converting back would take another pass over all
gradients.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptlite.ops.config import PRODUCTS
from gptlite.ops.weight_copies import as_dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fused: bool = False) -> Tensor:
    """Return x weightᵀ + bias, in x's dtype. x [..., in]; weight [out, in]; bias [out].

    `fused`: compute each parameter's gradient in that parameter's dtype. On a CPU, this has an effect only if
    x is bf16; on a GPU, only if weight and x have different dtypes, as with fp32 master weights.
    """
    if fused and (weight.dtype != x.dtype if PRODUCTS[x.device.type].fp32 else x.dtype == torch.bfloat16):
        return _Linear.apply(x, weight, bias)
    return F.linear(x, as_dtype(weight, x.dtype), cast(bias, x.dtype))


def linear_gradients(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, fused: bool) -> tuple[Tensor, Any]:
    """Return the gradients of weight and bias, rounded to x's dtype and cast to the dtypes of the parameters. dy [...,
    out]; x [..., in].

    `bias=None` means no bias. With `fused` on a GPU, sums are in fp32 and rounded once, to the parameters' dtype.
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
    """Return the matrix product of a and b in `dtype` (the operands' dtype or fp32), added in place to `onto` if given.

    A GPU writes its fp32 sums directly, which saves a pass for rounding and converting back.
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
    """Return a bias in `dtype`; None if there is no bias."""
    return None if tensor is None else as_dtype(tensor, dtype)


class _Linear(torch.autograd.Function):
    """Linear layer including the cast of its parameters, so that gradients are written in the parameters' dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        low = as_dtype(weight, x.dtype)
        ctx.save_for_backward(x, low)
        # Empty tensors have the dtype and device, and do not keep the fp32 weight alive.
        ctx.like, ctx.bias_like = weight.new_empty(0), None if bias is None else bias.new_empty(0)
        return F.linear(x, low, cast(bias, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        x, weight = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        bias = ctx.bias_like if ctx.needs_input_grad[2] else None
        return dx, *linear_gradients(dy, x, ctx.like, bias, fused=True)
