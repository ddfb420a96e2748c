"""A linear layer whose three products run in fp8 (Micikevicius et al. 2022, arXiv:2209.05433).

Each tensor has one scale, by which its largest element becomes the largest of its format: e4m3 for inputs and weights,
whose precision counts, e5m2 for gradients, whose range does. Sums are taken in fp32.

Both operands of a product are read along the summed dimension, so that what is read in two products is written in two
layouts, when it is quantized. The scale is of the tensor itself, not of earlier ones (delayed scaling): that would save
a reading of it, and need state in each layer that checkpoints and layouts carry.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
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
    rows = _Fp8Product.apply(x.reshape(-1, x.shape[-1]), weight, torch.is_grad_enabled())
    out = rows.view(*x.shape[:-1], len(weight))
    return out if bias is None else out + bias


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / scale in an fp8 dtype, and that scale, 0-dim fp32."""
    most = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp(min=SMALLEST_AMAX) / most
    return (x.float() / scale).clamp(-most, most).to(dtype), scale


def both_layouts(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """As `quantized`, with the transposed tensor beside, that too row by row in memory."""
    quotient, scale = quantized(x, dtype)
    return quotient, quotient.t().contiguous(), scale


def _best(quantize: Callable[..., tuple[Tensor, ...]], x: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    """The same, compiled where x is on a GPU: eager passes move 33 bytes an element, fused ones 5; transposing 2."""
    if not x.is_cuda or torch.compiler.is_compiling():  # then what is around it is compiled, and it too
        return quantize
    return compiled(quantize) if find_spec("triton") else quantize


@cache
def compiled(quantize: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Compiled once for all shapes."""
    from torch._inductor import config  # takes a second

    exact = "eager_numerics.division_rounding"  # else Triton's quotients may be off by a unit in the last place
    options: dict[str, Any] = {exact: True} if exact in config.get_config_copy() else {}
    return torch.compile(quantize, dynamic=True, fullgraph=True, options=options)


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, training: bool) -> Tensor:
        quantize = _best(both_layouts if training else quantized, x)
        (x8, *x8_t, x_scale), (w8, *w8_t, w_scale) = quantize(x, INPUT), quantize(weight, INPUT)
        ctx.save_for_backward(*x8_t, x_scale, *w8_t, w_scale)
        return _product(x8, x_scale, w8.t(), w_scale, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        x8_t, x_scale, w8_t, w_scale = ctx.saved_tensors
        g8, g8_t, g_scale = _best(both_layouts, grad)(grad, GRADIENT)
        dx = _product(g8, g_scale, w8_t.t(), w_scale, grad.dtype)
        dweight = _product(_filled(g8_t), g_scale, _filled(x8_t).t(), x_scale, grad.dtype)
        return dx, dweight, None


def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """a [N, K], row by row, times b [K, M], column by column in memory, as the hardware asks for them."""
    whole = ScalingType.TensorWise
    return F.scaled_mm(a, b, a_scale, whole, b_scale, whole, output_dtype=dtype)


def _filled(x: Tensor) -> Tensor:
    """Zeros beside the columns, which are summed over, up to a multiple."""
    missing = -x.shape[1] % MULTIPLE
    return torch.cat([x, x.new_zeros(len(x), missing)], 1) if missing else x
