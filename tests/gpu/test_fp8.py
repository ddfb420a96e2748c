"""Linear layers in fp8 by our kernels, against those by torch's ops, on the device."""

import pytest
import torch
from torch import Tensor

from gptlite.kernels.library import LoadedLibrary, load
from gptlite.ops.bias_activation import bias_activation
from gptlite.ops.fp8 import GRADIENT, INPUT, both_layouts, fp8_linear
from gptlite.ops.weight_copies import amax_of
from gpu.device import DEVICE

ROWS, WIDTH = 256, 512


@pytest.fixture(autouse=True)
def supported() -> None:
    assert isinstance(load(DEVICE.type), LoadedLibrary)
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 before sm_89")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


@pytest.mark.parametrize("dtype", [INPUT, GRADIENT], ids=str)
@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (2, 300, 1040), (33, 48)], ids=str)
def test_the_kernel_rounds_as_torch_does(shape, dtype) -> None:
    """On a GPU, torch multiplies the amax by 1 / 448 where the kernel divides it: scales differ by their last bit."""
    x = normal(*shape)
    (y, transposed, scale), (wanted, wanted_t, wanted_scale) = both_layouts(x, dtype, True), both_layouts(x, dtype)
    torch.testing.assert_close(scale, wanted_scale, rtol=2e-7, atol=0)
    assert torch.equal(y.t().contiguous().view(torch.uint8), transposed.contiguous().view(torch.uint8))
    for found, want in ((y, wanted), (transposed, wanted_t)):
        assert (found.float() != want.float()).float().mean() < (1e-4 if DEVICE.type == "cuda" else 1e-12)


def test_a_layer_and_its_gradients() -> None:
    x, weight, bias = normal(2, ROWS, WIDTH), normal(128, WIDTH, seed=1) / 20, normal(128, seed=2)
    results = []
    for fused in (True, False):
        leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
        out = fp8_linear(*leaves, fused=fused)
        out.backward(normal(2, ROWS, 128, seed=3))
        results.append([out.detach(), *(each.grad for each in leaves)])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-7 * float(wanted.abs().max()))


def test_the_amax_is_noted_in_both_directions() -> None:
    """Of the activation's result, and of the gradient that it passes back, which autograd hands on with its note."""
    seen = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            seen.append((hasattr(grad, "noted_amax"), amax_of(grad), grad.abs().max().float()))
            return grad

    x = Watched.apply(normal(ROWS, WIDTH).requires_grad_())
    y = bias_activation(x, normal(WIDTH, seed=1), "gelu_tanh", fused=True, amax=True)
    assert torch.equal(amax_of(y), y.detach().abs().max().float())
    y.backward(normal(ROWS, WIDTH, seed=2))
    ((noted, amax, wanted),) = seen
    assert noted
    assert torch.equal(amax, wanted)
