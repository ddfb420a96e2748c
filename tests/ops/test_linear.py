"""Linear layers whose parameters' gradients are a kernel's, against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from dispatched import Watching

from gptlite.cpu import cpu_flags
from gptlite.ops.config import ON_GPU, PRODUCTS
from gptlite.ops.linear import linear, linear_gradients

BF16_PRODUCTS = "avx512_bf16" in cpu_flags()
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
@pytest.mark.skipif(not BF16_PRODUCTS, reason="no AVX512-BF16 here")
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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_a_gpus_gradients_are_rounded_once(monkeypatch, mixed_products, dtype, bias) -> None:
    plain = gradients(False, dtype, bias, FP32)
    monkeypatch.setitem(PRODUCTS, "cpu", ON_GPU)
    ours = gradients(True, dtype, bias, FP32)
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])
    half = torch.finfo(dtype).eps / 2
    for mine, torchs in zip(ours[2:], plain[2:], strict=True):
        assert mine.dtype == FP32
        assert not torch.equal(mine, mine.to(dtype).float())
        torch.testing.assert_close(mine, torchs, rtol=2 * half, atol=half * 1e-2)


@pytest.mark.parametrize(("masters", "casts"), [(FP32, 2), (BF16, 0)], ids=str)
def test_gradients_of_masters_take_no_cast_on_a_gpu(masters, casts) -> None:
    """Those of the forward pass alone: of the weight and of the bias."""
    seen = []

    shapes = {(2, 8, 16): BF16, (24, 16): masters, (24,): masters}
    leaves = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape, dtype in shapes.items()]
    with Watching(lambda func, args, out: seen.append(str(func))):
        out = linear(*leaves, fused=True)
        before = len(seen)
        out.sum().backward()
    assert sum("_to_copy" in name for name in seen[before:]) == 0
    assert sum("_to_copy" in name for name in seen[:before]) == casts
    assert ("aten.mm.dtype" in seen) == (masters == FP32)
