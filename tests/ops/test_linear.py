"""Linear layers whose parameters' gradients are a kernel's, against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from gptlite.ops.linear import linear, linear_gradients
from gptlite.precision import cpu_flags

PRODUCTS = "avx512_bf16" in cpu_flags()
BF16, FP32 = torch.bfloat16, torch.float32


def gradients(fused: bool, dtype: torch.dtype, bias: bool, parameters: torch.dtype) -> list[torch.Tensor]:
    """The output and the gradients of x, weight and bias."""
    generator = torch.Generator().manual_seed(1)
    x, weight, offset, dy = (
        torch.randn(*shape, generator=generator) for shape in ((2, 50, 30), (70, 30), (70,), (2, 50, 70))
    )
    x = x.to(dtype).requires_grad_()
    leaves = [x, weight.to(parameters).requires_grad_(), *([offset.to(parameters).requires_grad_()] if bias else ())]
    out = linear(*leaves, fused=fused)
    return [out, *torch.autograd.grad(out, leaves, dy.to(dtype))]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("parameters", [FP32, BF16])
@pytest.mark.skipif(not PRODUCTS, reason="no AVX512-BF16 here")
def test_the_kernel_gives_what_torch_gives(kernels, bias, parameters) -> None:
    ours, plain = (gradients(fused, BF16, bias, parameters) for fused in (True, False))
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])
    for a, b in zip(ours[2:], plain[2:], strict=True):
        assert a.dtype == b.dtype == parameters
        torch.testing.assert_close(a, b, atol=2**-7, rtol=2**-7)  # two roundings to bf16, of sums in another order


def test_fp32_is_torchs_to_the_bit(kernels) -> None:
    for fused, plain in zip(gradients(True, FP32, True, FP32), gradients(False, FP32, True, FP32), strict=True):
        assert torch.equal(fused, plain)


def test_gradients_without_the_kernel() -> None:
    x, dy = torch.randn(3, 4, 5), torch.randn(3, 4, 6)
    weight = torch.randn(6, 5, requires_grad=True)
    expected = torch.autograd.grad(F.linear(x, weight), weight, dy)[0]
    dweight, dbias = linear_gradients(dy, x, weight, weight.new_empty(0), fused=False)
    torch.testing.assert_close(dweight, expected)
    torch.testing.assert_close(dbias, dy.sum((0, 1)))
