"""The paths that attention takes on a GPU, run on a CPU or on tensors without data."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dispatched import Dispatched
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from gptlite.ops import attention
from gptlite.ops.attention import causal_attention, heads, packed_causal_attention
from gptlite.ops.config import Attention
from gptlite.ops.dropout import DropoutKey

B, S, H, D = 2, 24, 3, 8
KEY = DropoutKey(5, torch.tensor(2), torch.tensor([11, 4]))
HIDDEN = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(3)) < 0.3


def draw(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A projection's output [B, S, H, 3, D], and the gradient of what attention makes of it."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(B, S, H, 3, D, generator=generator)
    return qkv.to(dtype).requires_grad_(), torch.randn(B, S, H, D, generator=generator).to(dtype)


def both(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Attention's output and gradient."""
    qkv, grad = draw()
    out = packed_causal_attention(qkv, *args, **options)
    return out.detach(), torch.autograd.grad(out, qkv, grad)[0]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("mask", [None, HIDDEN], ids=["causal", "masked"])
@pytest.mark.parametrize("choice", [Attention.sdpa, Attention.cudnn, Attention.fa3], ids=lambda choice: choice.value)
def test_dropout_beside_sdpa_takes_the_kernels(choice: Attention, mask: Tensor | None) -> None:
    options = {"dropout_p": 0.3, "key": KEY, "mask": mask}
    for fused, reference in zip(
        both(choice, **options, fused_scores=True), both(Attention.matmul, **options), strict=True
    ):
        torch.testing.assert_close(fused, reference, rtol=1e-5, atol=1e-6)
    qkv, grad = draw()
    with Dispatched() as dispatched:
        packed_causal_attention(qkv, choice, 0.3, KEY, mask, fused_scores=True).backward(grad)
    kernels = {"bmm": 6, "dropout": 2}
    assert dispatched.ops.items() >= kernels.items()
    assert dispatched.ops.total() <= (15 if mask is None else 18), dispatched.ops


def flash(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """SDPA where torch would take the kernel of a GPU: on tensors without data it takes products."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]


def test_gradients_of_queries_keys_and_values_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", flash)
    weight = torch.randn(3 * H * D, H * D, device="meta", dtype=torch.bfloat16, requires_grad=True)
    x = torch.randn(B, S, H * D, device="meta", dtype=torch.bfloat16, requires_grad=True)
    qkv = F.linear(x, weight).view(B, S, H, 3, D)
    loss = packed_causal_attention(qkv, Attention.sdpa).sum()
    with Dispatched() as dispatched:
        loss.backward()
    flashed = {"ones_like": 1, "_scaled_dot_product_flash_attention_backward": 1, "mm": 2}
    assert dispatched.ops == Counter(flashed | {"cat": 1})


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_grouped_heads_is_autograds_bit_for_bit(dtype: torch.dtype, fused: bool) -> None:
    qkv = torch.randn(B, S, H, 4, D, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    parts = qkv[:, :, :, :-2].flatten(2, 3), qkv[:, :, :, -2], qkv[:, :, :, -1]
    weights = [torch.randn_like(each.transpose(1, 2)) for each in parts]
    wanted = torch.autograd.grad([each.transpose(1, 2) for each in parts], qkv, weights)[0]
    found = torch.autograd.grad(heads(qkv, None, fused), qkv, weights)[0]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("choice", [Attention.sdpa, Attention.matmul], ids=lambda choice: choice.value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_the_views_is_autograds_bit_for_bit(choice: Attention, dtype: torch.dtype) -> None:
    qkv, grad = draw(dtype)
    q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind(0)
    wanted = torch.autograd.grad(causal_attention(q, k, v, choice).transpose(1, 2), qkv, grad)[0]
    found = torch.autograd.grad(packed_causal_attention(qkv, choice), qkv, grad)[0]
    assert torch.equal(found, wanted)
    assert found.is_contiguous()


def test_gradients_of_views_compiled_recomputed_and_taken_twice() -> None:
    qkv, grad = draw()

    def attend(qkv: Tensor) -> Tensor:
        return packed_causal_attention(2 * qkv, Attention.matmul)

    wanted = torch.autograd.grad(attend(qkv), qkv, grad)[0]
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for ways in (compiled, lambda qkv: checkpoint(attend, qkv, use_reentrant=False)):
        assert torch.equal(torch.autograd.grad(ways(qkv), qkv, grad)[0], wanted)
    out = attend(qkv)
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(out, qkv, grad, retain_graph=True)[0], wanted)


def test_one_query_of_generation_is_never_cudnns(monkeypatch: pytest.MonkeyPatch) -> None:
    """It plans for every number of keys."""
    gpu, cudnn = torch.device("cuda"), SDPBackend.CUDNN_ATTENTION
    for choice in (Attention.sdpa, Attention.cudnn, Attention.fa3):
        found = attention._backends(choice, gpu, several=False)
        assert found
        assert cudnn not in found
    assert attention._backends(Attention.cudnn, gpu, several=True) == [cudnn]
    assert attention._backends(Attention.sdpa, gpu, several=True) == []
    asked = []
    monkeypatch.setattr(attention, "_backends", lambda *args: asked.append(args) or attention.ONE_QUERY)
    q, k, v = (torch.randn(B, H, n, D) for n in (1, S, S))
    torch.testing.assert_close(
        causal_attention(q, k, v, Attention.sdpa), F.scaled_dot_product_attention(q, k, v), rtol=1e-5, atol=1e-6
    )
    assert asked == [(Attention.sdpa, q.device, False)]


def flash_on_cpu(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor]:
    """Flash attention of a GPU, whose causal mask is aligned with the last query and the last key."""
    assert is_causal
    return (F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2])),)


@pytest.mark.parametrize("choice", [Attention.sdpa, Attention.fa3], ids=lambda choice: choice.value)
def test_the_last_queries_of_more_keys_take_flash_attention(choice: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(B, H, n, D, generator=generator).requires_grad_() for n in (10, S, S)]
    masked = causal_attention(*tensors, choice)
    monkeypatch.setattr(attention, "_takes_flash", lambda *qkv: True)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", flash_on_cpu)
    flashed = causal_attention(*tensors, choice)
    assert torch.equal(flashed, masked)
    assert all(map(torch.equal, *(torch.autograd.grad(out.sum(), tensors) for out in (flashed, masked))))


def test_they_write_no_mask_while_ops_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in selective checkpointing, which cannot make torch's causal_lower_right."""
    monkeypatch.setattr(attention, "_takes_flash", lambda *qkv: True)
    options: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.randn(B, H, n, 64, **options) for n in (10, S, S))
    with Dispatched() as dispatched:
        causal_attention(q, k, v, Attention.sdpa).sum().backward()
    flashed = "_scaled_dot_product_flash_attention"
    assert dispatched.ops == Counter({flashed: 1, f"{flashed}_backward": 1, "sum": 1, "ones_like": 1})


@pytest.mark.parametrize("choice", [Attention.sdpa, Attention.fa3], ids=lambda choice: choice.value)
def test_windows_take_flash_attention_without_a_mask(choice: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_takes_flash", lambda *qkv: True)
    qkv = torch.randn(B, S, H, 3, D, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with Dispatched() as dispatched:
        packed_causal_attention(qkv, choice, mask=7).sum().backward()
    once = ("_flash_attention_forward", "_flash_attention_backward", "sum", "ones_like", "cat")
    assert dispatched.ops == Counter(once)
    asked = []
    given = torch.ops.aten._flash_attention_forward
    flash_forward = lambda *args, **options: asked.append((*args[3:], options)) or given(*args, **options)  # noqa: E731
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    q, k, v = (torch.randn(B, H, n, D, device="meta", dtype=torch.bfloat16) for n in (10, S, S))
    assert causal_attention(q, k, v, choice, mask=7).shape == q.shape
    # Of the 7 positions, 6 are before the query's own; the mask of the window replaces the causal one.
    assert asked == [(None, None, 10, S, 0.0, False, False, {"window_size_left": 6, "window_size_right": 0})]


def test_compiled_code_asks_for_the_gpus_generation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On older ones windows are masks."""
    for capability, known in (((7, 5), False), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        torch.compiler.reset()

        def flashed(x: Tensor) -> Tensor:
            return x + 1 if torch.compiler.is_compiling() and attention._from_ampere_on(0) else x

        out = torch.compile(flashed, backend="eager", fullgraph=True)(torch.zeros(2))
        assert out.tolist() == [float(known)] * 2


def test_documents_and_windows_take_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def varlen(q: Tensor, k: Tensor, v: Tensor, *spans: Any, window_size: tuple[int, int]) -> Tensor:
        asked.append(window_size)
        return q

    monkeypatch.setattr(attention, "varlen_attn", varlen)
    spans = attention.Spans(torch.tensor([0, 5, B * S], dtype=torch.int32), S)
    for window in (0, 7):
        packed_causal_attention(draw()[0], Attention.sdpa, mask=spans._replace(window=window))
    assert asked == [(-1, 0), (6, 0)]
