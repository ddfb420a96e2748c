"""A linear layer whose three products run in fp8 (Micikevicius et al. 2022, arXiv:2209.05433).

Each tensor has one scale, by which its largest element becomes the largest of its format: e4m3 for inputs and weights,
whose precision counts, e5m2 for gradients, whose range does. Sums are taken in fp32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import ScalingType

INPUT, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # the hardware's: every side of a product is a multiple of this
SMALLEST_AMAX = 1e-12  # a tensor of zeros has a scale, too


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] weight [out, in]ᵀ + bias [out], in x's dtype; `in` and `out` are multiples of MULTIPLE.

    The backward pass multiplies in fp8, too; what it keeps of x and weight takes a byte an element.
    """
    out = _Fp8Product.apply(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], len(weight))
    return out if bias is None else out + bias


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / scale in an fp8 dtype, and that scale, 0-dim fp32."""
    most = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp(min=SMALLEST_AMAX) / most
    return (x.float() / scale).clamp(-most, most).to(dtype), scale


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        (x8, x_scale), (w8, w_scale) = quantized(x, INPUT), quantized(weight, INPUT)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        return _product(x8, x_scale, w8.t(), w_scale, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        g8, g_scale = quantized(grad, GRADIENT)
        dx = _product(g8, g_scale, _column_major(w8), w_scale, grad.dtype)
        # The rows are summed over: zeros fill them up to a multiple.
        g8, x8 = _filled(g8), _filled(x8)
        dweight = _product(g8.t().contiguous(), g_scale, _column_major(x8), x_scale, grad.dtype)
        return dx, dweight


def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """a [N, K], row by row, times b [K, M], column by column in memory, as the hardware asks for them."""
    whole = ScalingType.TensorWise
    return F.scaled_mm(a, b, a_scale, whole, b_scale, whole, output_dtype=dtype)


def _column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def _filled(x: Tensor) -> Tensor:
    missing = -len(x) % MULTIPLE
    return torch.cat([x, x.new_zeros(missing, x.shape[1])]) if missing else x
