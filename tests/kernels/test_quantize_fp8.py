"""Quantization of a matrix to fp8, in both layouts: the numbers of torch's, without exception."""

import math

import torch
from torch import Tensor

from gptlite.ops.fp8 import GRADIENT, INPUT, SMALLEST_AMAX
from kernels.backends import Backend
from kernels.cases import BF16, DTYPES, each, normal, of_dtypes, on
from kernels.loop import loop_over

# Tiles are of 128 x 128; packs take rows and columns by sixteens.
SIZES = ((1, 1), (1, 16), (16, 1), (3, 5), (16, 16), (17, 48), (48, 17), (128, 128), (144, 272), (129, 127), (257, 384))
CORE = ((17, 48), (48, 17), (144, 272), (129, 127))


def largest(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, torch.inf).float()


def check_quantized(backend: Backend, x: Tensor, e5m2: bool, both: bool = True) -> None:
    dtype = GRADIENT if e5m2 else INPUT
    most = torch.finfo(dtype).max
    scale = largest(x).clamp(min=SMALLEST_AMAX) / most
    wanted = (x.float() / scale).clamp(-most, most).to(dtype)
    y, transposed, found = backend.quantize_fp8(x, largest(x), e5m2, both)
    assert torch.equal(found.nan_to_num(-1), scale.nan_to_num(-1))
    assert (transposed is not None) == both
    same_fp8(y, wanted)
    if transposed is not None:
        same_fp8(transposed, wanted.t().contiguous())


def same_fp8(bits: Tensor, wanted: Tensor) -> None:
    """Of 0 and NaN, a GPU does not keep the sign."""
    numbers = bits.view(wanted.dtype).float()
    assert torch.equal(numbers.isnan(), wanted.float().isnan())
    assert torch.equal(numbers.nan_to_num(), wanted.float().nan_to_num())


@each("size,dtype", [(size, dtype) for size in SIZES for dtype in DTYPES], [(size, BF16) for size in CORE])
@loop_over("e5m2", (False, True))
def test_sizes(backend: Backend, size, dtype, e5m2) -> None:
    check_quantized(backend, normal(size, dtype, "x"), e5m2)


@on()
@loop_over("e5m2", (False, True))
@loop_over("amax", (1.0, 0.013, 1.99, 3e-13, 7e-30, 3e38))
def test_every_number_of_16_bits(backend: Backend, amax, e5m2) -> None:
    """The quotients are rounded as divisions are: of scales that are no powers of 2 many lie near a tie."""
    x = torch.arange(2**16).to(torch.int16).view(BF16).view(512, 128)
    x = torch.where(x.abs() <= amax, x, 0.0)
    x[0, 0] = amax
    check_quantized(backend, x, e5m2)


@on()
@loop_over("e5m2", (False, True))
@loop_over("value", (math.nan, -math.nan, math.inf, -math.inf))
def test_what_is_not_finite(backend: Backend, value, e5m2) -> None:
    """With an infinity, numbers become 0 and it becomes NaN; with a NaN, all do."""
    x = normal((32, 48), BF16, "x")
    x[3, 4] = value
    check_quantized(backend, x, e5m2)
    y, _, _ = backend.quantize_fp8(x, largest(x), e5m2)
    assert y.view(GRADIENT if e5m2 else INPUT).float().isnan().sum() == (x.numel() if math.isnan(value) else 1)


@on()
@of_dtypes()
@loop_over("offset", (0, 1))
def test_one_layout_zeros_and_alignment(backend: Backend, dtype, offset) -> None:
    backend = backend.having(offsets=(offset, 0, 0, offset))
    check_quantized(backend, normal((48, 32), dtype, "x"), False, both=False)
    check_quantized(backend, normal((48, 32), dtype, "x"), True)
    check_quantized(backend, torch.zeros(16, 32, dtype=dtype), True)
