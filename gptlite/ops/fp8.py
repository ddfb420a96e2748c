"""Linear layer whose three GEMMs (forward, input gradient, weight gradient) run in fp8 (Micikevicius et al. 2022,
arXiv:2209.05433).

Each tensor has one scale, which maps its absolute maximum (amax) to the largest value of its format: e4m3 for inputs
and weights, which need precision, and e5m2 for gradients, which need range. Sums are in fp32.

Both operands of a GEMM must be contiguous along the summed dimension. A tensor used in two GEMMs is therefore written
in two layouts when it is quantized. The scale comes from the current tensor, not from those of earlier steps (delayed
scaling). Delayed scaling would save a read of the tensor, but needs state per layer, which checkpoints would have to
store for any layout.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptlite.ops.config import PRODUCTS
from gptlite.ops.weight_copies import amax_of
from gptlite.torch_private.modules import inductor_has
from gptlite.torch_private.ops import scaled_mm

INPUT, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # the hardware requires every dimension of a GEMM to be a multiple of this
SMALLEST_AMAX = 1e-12  # avoids a scale of 0 for a tensor of zeros


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fused: bool = False) -> Tensor:
    """Return x [..., in] weight [out, in]ᵀ + bias [out], in x's dtype. `in` and `out` are multiples of MULTIPLE.

    The GEMMs of the backward pass also run in fp8. The saved copies of x and weight take one byte per element. `fused`:
    our kernel quantizes, with the amax that the op which wrote the tensor has noted, and a GPU's GEMM adds the bias.
    """
    added = bias if fused and PRODUCTS[x.device.type].compiled else None
    # Grad mode is read here, since it is always off within a Function's forward.
    out = _Fp8Product.apply(x, weight, added, torch.is_grad_enabled(), fused)
    return out if bias is added else out + bias


def fp8_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix product of a [N, K] and b [K, M], in a's dtype. a is quantized to the fp8 format `dtype`, b to
    e4m3. M is a multiple of MULTIPLE."""
    (a8, a_scale), (b8, b_scale) = quantized(a.contiguous(), dtype), quantized(b.t().contiguous(), INPUT)
    return _product(_filled(a8), a_scale, _filled(b8).t(), b_scale, a.dtype)


def quantized(x: Tensor, dtype: torch.dtype, fused: bool = False) -> tuple[Tensor, Tensor]:
    """Return the rows of x / scale, [N, K] for x [..., K], in an fp8 dtype, and the scale, an fp32 scalar tensor.
    `fused`: by our kernel."""
    if fused:
        y, _, scale = _by_kernel(x, dtype, both=False)
        return y, scale
    scale = scale_of(x, dtype)
    return _best(to_fp8, x)(_rows(x), scale, dtype), scale


def both_layouts(x: Tensor, dtype: torch.dtype, fused: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of x / scale, their transpose (also contiguous), and the scale; see `quantized`."""
    if fused:
        return _by_kernel(x, dtype, both=True)
    scale = scale_of(x, dtype)
    return *_best(rounded_both, x)(_rows(x), scale, dtype), scale


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1]).contiguous()


def _by_kernel(x: Tensor, dtype: torch.dtype, both: bool) -> tuple[Tensor, Tensor, Tensor]:
    y, transposed, scale = torch.ops.gptlite.quantize_fp8(_rows(x), amax_of(x), dtype == GRADIENT, both)
    return y.view(dtype), transposed.view(dtype), scale


def scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale that maps x's amax to the largest value of `dtype`, an fp32 scalar tensor."""
    return amax_of(x).clamp(min=SMALLEST_AMAX) / torch.finfo(dtype).max


def to_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x / scale in an fp8 dtype."""
    most = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-most, most).to(dtype)  # values rounded up beyond `most` would become NaN


def rounded_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x / scale and its transpose (also contiguous) in an fp8 dtype."""
    quotient = to_fp8(x, scale, dtype)
    return quotient, quotient.t().contiguous()


def _best(function: Callable[..., Any], x: Tensor) -> Callable[..., Any]:
    """Return `function`, compiled if x is on a GPU. Eager execution moves 31 bytes per element, a compiled function 3.
    A transpose adds 2."""
    if torch.compiler.is_compiling() or not PRODUCTS[x.device.type].compiled:
        return function
    if x.is_meta:
        return partial(_allocated, both=function is rounded_both)
    return compiled(function) if find_spec("triton") else function


def _allocated(x: Tensor, scale: Tensor, dtype: torch.dtype, both: bool) -> Any:
    """Return the results of a compiled function on a tensor without values."""
    quotient = torch.empty_like(x, dtype=dtype)
    return (quotient, quotient.new_empty(quotient.shape[::-1])) if both else quotient


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, compiled once for all shapes of contiguous tensors."""
    exact = "eager_numerics.division_rounding"  # otherwise Triton's division may be off by one ulp
    options: dict[str, Any] = {exact: True} if inductor_has(exact) else {}
    return torch.compile(function, dynamic=True, options=options)


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, training: bool, fused: bool) -> Tensor:
        quantize, ctx.fused = partial(both_layouts if training else quantized, fused=fused), fused
        (x8, *x8_t, x_scale), (w8, *w8_t, w_scale) = quantize(x, INPUT), quantize(weight, INPUT)
        ctx.save_for_backward(*x8_t, x_scale, *w8_t, w_scale)
        return _product(x8, x_scale, w8.t(), w_scale, x.dtype, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        x8_t, x_scale, w8_t, w_scale = ctx.saved_tensors
        g8, g8_t, g_scale = both_layouts(grad, GRADIENT, ctx.fused)
        dx = _product(g8, g_scale, w8_t.t(), w_scale, grad.dtype).view(*grad.shape[:-1], len(w8_t))
        dweight = _product(_filled(g8_t), g_scale, _filled(x8_t).t(), x_scale, grad.dtype)
        dbias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None


def _product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Return the matrix product of a [N, K], row-major, and b [K, M], column-major, the layouts that the hardware
    requires, plus bias [M]."""
    return scaled_mm(a, b, a_scale, b_scale, bias, dtype)


def _filled(x: Tensor) -> Tensor:
    """Return x with zero columns appended up to a multiple of MULTIPLE. The columns are the summed dimension of the
    GEMM."""
    missing = -x.shape[1] % MULTIPLE
    return torch.cat([x, x.new_zeros(len(x), missing)], 1) if missing else x
