"""Attention windows by flash attention, against scores that are written out, and in documents."""

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gptlite.ops.attention import Spans, causal_attention, packed_causal_attention
from gptlite.ops.config import Attention
from gpu.device import DEVICE

BF16 = torch.bfloat16
flash = pytest.mark.skipif(
    DEVICE.type != "cuda" or torch.cuda.get_device_capability(DEVICE) < (8, 0),
    reason="flash attention is for GPUs from sm_80 on",
)


def draw(queries: int, keys: int, heads: int = 4, kv_heads: int = 4, width: int = 64) -> list[Tensor]:
    """q, k, v and the gradient of the output, in bf16."""
    generator = torch.Generator().manual_seed(queries)
    sizes = [(heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries)]
    return [torch.randn(2, *size, width, generator=generator).to(DEVICE, BF16) for size in sizes]


def results(tensors: list[Tensor], choice: Attention, window: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    """The output, dq, dk and dv."""
    q, k, v, grad = (each.to(dtype) for each in tensors)
    leaves = [each.requires_grad_() for each in (q, k, v)]
    out = causal_attention(*leaves, choice, mask=window)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def check(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Off by at most 2% of the largest element, or of 1: probabilities and their gradients are rounded to bf16."""
    for ours, exact in zip(found, wanted, strict=True):
        assert ((ours.double() - exact).abs().max() / exact.abs().max().clamp(min=1.0)).item() < 0.02


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 200, 1000])
@pytest.mark.parametrize(("queries", "keys"), [(1, 300), (130, 300), (300, 300)])
def test_windows_match_written_out_scores_in_fp64(queries: int, keys: int, window: int) -> None:
    tensors = draw(queries, keys)
    exact = results(tensors, Attention.matmul, window, torch.float64)
    check(results(tensors, Attention.sdpa, window), exact)


def test_grouped_heads() -> None:
    tensors = draw(200, 200, heads=8, kv_heads=2, width=128)
    check(results(tensors, Attention.sdpa, 70), results(tensors, Attention.matmul, 70, torch.float64))


@flash
def test_documents_with_windows() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 256, 4, 3, 64, generator=generator).to(DEVICE, BF16).requires_grad_()
    grad = torch.randn(2, 256, 4, 64, generator=generator).to(DEVICE, BF16)
    ends = [100, 256, 256 + 30, 512]
    spans = Spans(torch.tensor([0, *ends], dtype=torch.int32, device=DEVICE), 226, 40)
    found = packed_causal_attention(qkv, Attention.sdpa, mask=spans)
    numbers = torch.bucketize(torch.arange(512, device=DEVICE), torch.tensor(ends, device=DEVICE), right=True).view(
        2, 256
    )
    places = torch.arange(256, device=DEVICE)
    hidden = (numbers[:, :, None] != numbers[:, None, :]) | (places <= places[:, None] - 40)
    exact = qkv.detach().double().requires_grad_()
    wanted = packed_causal_attention(exact, Attention.matmul, mask=hidden[:, None])
    pairs = [(found, wanted)]
    pairs += zip(torch.autograd.grad(found, qkv, grad), torch.autograd.grad(wanted, exact, grad.double()), strict=True)
    check([ours.detach() for ours, _ in pairs], [theirs.detach() for _, theirs in pairs])


@flash
def test_a_narrow_window_takes_less_time_than_none() -> None:
    """Of 8,192 positions, a window of 256 leaves a sixteenth of the scores: flash attention skips the others."""

    def microseconds(window: int | None) -> float:
        qkv = torch.randn(1, 8192, 16, 3, 64, device=DEVICE, dtype=BF16, requires_grad=True)
        grad = torch.randn(1, 8192, 16, 64, device=DEVICE, dtype=BF16)
        for _ in range(3):
            packed_causal_attention(qkv, Attention.sdpa, mask=window).backward(grad)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            packed_causal_attention(qkv, Attention.sdpa, mask=window).backward(grad)
            torch.cuda.synchronize()
        return sum(event.self_device_time_total for event in profiled.key_averages())

    assert microseconds(256) < 0.7 * microseconds(None)  # the rest copies the gradients of q, k and v
