"""Grouped GEMMs of experts on the device, in each dtype against a loop in fp64."""

import pytest
import torch

from gptlite.ops.experts import Dispatch, grouped_linear
from gpu.device import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # of the largest value


def gradients(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, fused: bool, fp8: bool) -> list[torch.Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = grouped_linear(x, weight, ends, fused, fp8)
    out.backward(torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype))
    assert x.grad is not None
    assert weight.grad is not None
    return [out.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("sizes", [(64, 96), (6, 10)], ids=["aligned", "unaligned"])
def test_grouped_products(sizes, dtype):
    """Expert 2 has no rows."""
    chosen = torch.tensor([[0, 3], [3, 4], [0, 4], [4, 1]], device=DEVICE)
    ends = Dispatch.of(chosen, 5).ends
    x = torch.randn(8, sizes[0], device=DEVICE).to(dtype)
    weight = torch.randn(5, sizes[1], sizes[0], device=DEVICE).to(dtype)
    want = gradients(x.double(), weight.double(), ends, fused=False, fp8=False)
    for got, exact in zip(gradients(x, weight, ends, fused=True, fp8=False), want, strict=True):
        assert (got.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()


def test_grouped_products_in_fp8():
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs sm_89")
    ends = torch.tensor([5, 6, 6, 23], dtype=torch.int32, device=DEVICE)
    x = torch.randn(23, 32, device=DEVICE).bfloat16()
    weight = torch.randn(4, 48, 32, device=DEVICE).bfloat16()
    want = gradients(x.double(), weight.double(), ends, fused=False, fp8=False)
    for got, exact in zip(gradients(x, weight, ends, fused=True, fp8=True), want, strict=True):
        assert (got.double() - exact).abs().max() <= 0.15 * exact.abs().max()
