"""Linear layer whose three GEMMs (forward, input gradient, weight gradient) run in fp8 (Micikevicius et al. 2022,
arXiv:2209.05433).

Each tensor has one scale, which maps its absolute maximum (amax) to the largest value of its format: e4m3 for inputs
and weights, which need precision, and e5m2 for gradients, which need range. Sums are in fp32.

Both operands of a GEMM must be contiguous along the summed dimension. A tensor used in two GEMMs is therefore written
in two layouts when it is quantized. The scale comes from the current tensor, not from those of earlier steps (delayed
scaling). Delayed scaling would save a read of the tensor, but needs state per layer, which checkpoints would have to
store for any layout.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from gptlite.ops.config import E5M2_ONE, PRODUCTS
from gptlite.ops.weight_copies import amax_of, as_dtype
from gptlite.torch_private.modules import inductor_has
from gptlite.torch_private.ops import scaled_mm, version_of

INPUT, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # the hardware requires every dimension of a GEMM to be a multiple of this
SMALLEST_AMAX = 1e-12  # avoids a scale of 0 for a tensor of zeros


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fused: bool = False) -> Tensor:
    """Return x [..., in] weight [out, in]ᵀ + bias [out], in x's dtype. `in` and `out` are multiples of MULTIPLE.

    The GEMMs of the backward pass also run in fp8. The saved copies of x and weight take one byte per element. `fused`:
    our kernel quantizes, with the amax that the op which wrote the tensor has noted, and a GPU's GEMM adds the bias.
    """
    if not hasattr(weight, "fp8_operands"):
        weight = as_dtype(weight, x.dtype)
    added = bias if fused and PRODUCTS[x.device.type].compiled else None
    # Grad mode is read here, since it is always off within a Function's forward.
    out = _Fp8Product.apply(x, weight, added, torch.is_grad_enabled(), fused)
    return out if bias is added else out + bias


def fp8_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix product of a [N, K] and b [K, M], in a's dtype. a is quantized to the fp8 format `dtype`, b to
    e4m3. M is a multiple of MULTIPLE."""
    (a8, a_scale), (b8, b_scale) = quantized(a.contiguous(), dtype), quantized(b.t().contiguous(), INPUT)
    return scaled_product(filled(a8), a_scale, filled(b8).t(), b_scale, a.dtype)


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


def transposed(x: Tensor) -> Tensor:
    """Return the transpose of an fp8 tensor, contiguous."""
    return _best(bytes_transposed, x)(x.view(torch.uint8)).view(x.dtype)


def bytes_transposed(x: Tensor) -> Tensor:
    """Return the transpose of a tensor of bytes, contiguous."""
    return x.t().contiguous()


def _best(function: Callable[..., Any], x: Tensor) -> Callable[..., Any]:
    """Return `function`, compiled if x is on a GPU. Eager execution moves 31 bytes per element, a compiled function 3.
    A transpose adds 2."""
    if torch.compiler.is_compiling() or not PRODUCTS[x.device.type].compiled:
        return function
    if x.is_meta and function is not bytes_transposed:
        return partial(_allocated, both=function is rounded_both)
    return compiled(function) if find_spec("triton") and not x.is_meta else function


def _allocated(x: Tensor, scale: Tensor, dtype: torch.dtype, both: bool) -> Any:
    """Return the results of a compiled function on a tensor without values, by ops that move as many bytes."""
    quotient = x.detach().to(dtype)
    return (quotient, quotient.t().contiguous()) if both else quotient


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, compiled once for all shapes of contiguous tensors."""
    exact = "eager_numerics.division_rounding"  # otherwise Triton's division may be off by one ulp
    options: dict[str, Any] = {exact: True} if inductor_has(exact) else {}
    return torch.compile(function, dynamic=True, options=options)


@dataclass
class KeptOperands:
    """A weight's operands, for as long as it has a version, like WeightCopy (ops/weight_copies.py)."""

    values: tuple[Tensor, ...] = ()
    version: int = -1


def keep_operands(parts: Iterable[nn.Module]) -> None:
    """Let linear layers and the head quantize each weight once per version, instead of in each forward pass.

    This takes two bytes per weight between steps. Only for weights that are whole and on the device: FSDP2 writes what
    it gathers without raising a version.
    """
    for module in (each for part in parts for each in part.modules()):
        weight = getattr(module, "weight", None)
        if getattr(module, "fp8", False) and isinstance(weight, Tensor) and not isinstance(weight, DTensor):
            weight.fp8_operands = KeptOperands()  # type: ignore[attr-defined]


def kept(
    weight: Tensor, values: Callable[[], Tensor], training: bool = True, fused: bool = False
) -> tuple[Tensor, ...]:
    """Return `values()`, those of a weight, in both layouts and with their scale; without training, in one layout.

    If the weight has an attribute `fp8_operands`, they are from an earlier call, until the weight's version changes.
    """
    place: KeptOperands | None = getattr(weight, "fp8_operands", None)
    if place is None:
        return (both_layouts if training else quantized)(values(), INPUT, fused)
    if place.version != version_of(weight):
        place.values, place.version = both_layouts(values(), INPUT, fused), version_of(weight)
    return place.values


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, training: bool, fused: bool) -> Tensor:
        x8, *x8_t, x_scale = (both_layouts if training else quantized)(x, INPUT, fused)
        w8, *w8_t, w_scale = kept(weight, lambda: as_dtype(weight, x.dtype), training, fused)
        ctx.fused, ctx.dtype = fused, weight.dtype
        ctx.save_for_backward(*x8_t, x_scale, *w8_t, w_scale)
        return scaled_product(x8, x_scale, w8.t(), w_scale, x.dtype, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        x8_t, x_scale, w8_t, w_scale = ctx.saved_tensors
        g8, g8_t, g_scale = both_layouts(grad, GRADIENT, ctx.fused)
        dx = scaled_product(g8, g_scale, w8_t.t(), w_scale, grad.dtype).view(*grad.shape[:-1], len(w8_t))
        dweight = scaled_product(filled(g8_t), g_scale, filled(x8_t).t(), x_scale, grad.dtype)
        dbias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return dx, dweight.to(ctx.dtype), dbias, None, None


def scaled_product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Return the matrix product of a [N, K], row-major, and b [K, M], column-major, the layouts that the hardware
    requires, plus bias [M]."""
    return scaled_mm(a, b, a_scale, b_scale, bias, dtype)


def filled(x: Tensor) -> Tensor:
    """Return x with zero columns appended up to a multiple of MULTIPLE. The columns are the summed dimension of the
    GEMM."""
    missing = -x.shape[1] % MULTIPLE
    return torch.cat([x, x.new_zeros(len(x), missing)], 1) if missing else x


class Fp8HeadProducts:
    """HeadProducts (ops/cross_entropy.py) with operands in fp8, without a pass over the logits' gradient for its scale.

    Cross entropy writes the gradient in e5m2, where E5M2_ONE is 1. Softmax gives no larger element, and almost always
    one that is nearly as large, so amax would be about the same. The factor `upstream` of the loss, such as its scale
    divided by the number of targets, enters only the scale by which GEMMs multiply; None means 1. `table()` makes the
    table of the weight, with zeros after its first `rows` rows.
    """

    def __init__(self, weight: Tensor, rows: int, table: Callable[[], Tensor], upstream: float | None) -> None:
        self.rows = rows
        self.by_row, self.by_column, self.scale = kept(weight, table)
        factor = 1.0 if upstream is None else upstream
        self.gradient_scale = torch.full((), factor / E5M2_ONE, device=weight.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, columns] of a chunk, and keep the chunk's other layout for `table_gradient`."""
        by_row, self.hidden_by_column, self.hidden_scale = both_layouts(hidden.contiguous(), INPUT)
        self.dtype = hidden.dtype
        return scaled_product(by_row, self.hidden_scale, self.by_row.t(), self.scale, hidden.dtype)

    def memory(self, logits: Tensor) -> Tensor:
        """Return memory for the gradient in e5m2, with zeros at the padding."""
        gradient = torch.empty_like(logits, dtype=torch.uint8)
        gradient[:, self.rows :].zero_()
        return gradient.view(GRADIENT)

    def hidden_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of a chunk's hidden states from that of its logits."""
        return scaled_product(gradient, self.gradient_scale, self.by_column.t(), self.scale, self.dtype)

    def table_gradient(self, gradient: Tensor, hidden: Tensor, dtype: torch.dtype, before: Tensor | None) -> Tensor:
        """Return a chunk's gradient of the table, added to `before`, the sum over earlier chunks, if there is one."""
        left, right = filled(transposed(gradient)), filled(self.hidden_by_column).t()
        part = scaled_product(left, self.gradient_scale, right, self.hidden_scale, dtype)
        return part if before is None else before.add_(part)
