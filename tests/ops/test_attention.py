"""Causal attention against SDPA in fp64, and against its own definition where there is dropout."""

import math

import pytest
import torch
import torch.nn.functional as F

from gptlite.ops import attention
from gptlite.ops.attention import causal_attention, packed_causal_attention
from gptlite.ops.config import Attention
from gptlite.ops.dropout import DropoutKey, keep_mask

# Largest error over the largest value of the fp64 result. bf16 has 8 bits: half a unit in the last place is 2e-3,
# and the probabilities and the score gradients are each rounded to it once before they are multiplied.
TOLERANCE = {torch.float32: {"out": 1e-6, "grad": 3e-6}, torch.bfloat16: {"out": 1e-2, "grad": 2e-2}}
BLOCK = 16
NO_WINDOW = 1000
SHAPES = [  # Sq, Sk
    (1, 1),
    (1, 9),
    (7, 7),
    (5, 12),
    (BLOCK, BLOCK),
    (BLOCK + 1, BLOCK + 1),
    (3 * BLOCK - 5, 3 * BLOCK - 5),
    (2 * BLOCK + 3, 3 * BLOCK + 7),
]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", BLOCK)


def draw(queries: int, keys: int, batch: int = 2, heads: int = 3, width: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    lengths = (queries, keys, keys, queries)  # q, k, v, gradient of the output
    return [torch.randn(batch, heads, n, width, generator=generator) for n in lengths]


def run(attend, tensors, dtype):
    q, k, v, grad = (t.to(dtype) for t in tensors)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def sdpa(q, k, v, window=NO_WINDOW):
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    visible &= ~torch.ones_like(visible).tril(k.shape[2] - q.shape[2] - window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)


def check(attend, tensors, dtype, window=NO_WINDOW):
    rounded = [t.to(dtype) for t in tensors]  # the reference reads what the op reads
    names, reference = ("out", "dq", "dk", "dv"), run(lambda *qkv: sdpa(*qkv, window), rounded, torch.float64)
    for name, got, want in zip(names, run(attend, rounded, dtype), reference, strict=True):
        assert got.dtype == dtype
        error = (got.double() - want).abs().max() / max(want.abs().max(), 1.0)  # a lone key's cancel
        assert error < TOLERANCE[dtype]["out" if name == "out" else "grad"], f"{name}: {error:.1e}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("choice", [Attention.matmul, Attention.sdpa], ids=lambda choice: choice.value)
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_outputs_and_gradients_match_the_reference(small_blocks, queries, keys, choice, dtype):
    check(lambda *qkv: causal_attention(*qkv, choice), draw(queries, keys), dtype)


WINDOWED = (Attention.matmul, Attention.sdpa, Attention.fused, Attention.fused_softmax)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("choice", WINDOWED, ids=lambda choice: choice.value)
@pytest.mark.parametrize("window", [1, 2, 7, 16, 40, 100])
def test_windows_match_the_reference(window, choice, dtype):
    for queries, keys in [(1, 9), (1, 90), (7, 7), (5, 12), (90, 90), (30, 100)]:
        check(lambda *qkv: causal_attention(*qkv, choice, mask=window), draw(queries, keys), dtype, window)
    q, k, v, grad = draw(70, 70, heads=6)
    check(lambda *qkv: causal_attention(*qkv, choice, mask=window), (q, k[:, :2], v[:, :2], grad), dtype, window)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("choice", WINDOWED, ids=lambda choice: choice.value)
def test_windows_of_packed_attention_are_those_of_its_parts(choice):
    qkv = torch.randn(2, 50, 3, 3, 8, generator=torch.Generator().manual_seed(0))
    q, k, v = qkv.permute(3, 0, 2, 1, 4)
    for window in (1, 6, 80):
        out = packed_causal_attention(qkv, choice, mask=window).transpose(1, 2)
        torch.testing.assert_close(out, sdpa(q, k, v, window), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("choice", [Attention.matmul, Attention.fused], ids=lambda choice: choice.value)
def test_windows_with_dropout(choice):
    q, k, v, _ = draw(20, 25)
    key = DropoutKey(5, torch.tensor(2), torch.tensor([11, 4]))
    out = causal_attention(q, k, v, choice, 0.3, key, 6)
    hidden = torch.ones(20, 25, dtype=torch.bool).tril(25 - 20 - 6)
    torch.testing.assert_close(out, causal_attention(q, k, v, Attention.matmul, 0.3, key, hidden))


def test_a_query_sees_nothing_of_later_keys(small_blocks):
    q, k, v, _ = draw(37, 37)
    before = causal_attention(q, k, v, Attention.matmul)
    k[:, :, 20:], v[:, :, 20:] = 1e4, float("nan")
    after = causal_attention(q, k, v, Attention.matmul)
    assert torch.equal(before[:, :, :16], after[:, :, :16])  # blocks that never read them
    q, k, v, _ = draw(37, 37)
    k[:, :, 20:], v[:, :, 20:] = 1e4, -1e4
    torch.testing.assert_close(causal_attention(q, k, v, Attention.matmul)[:, :, :20], before[:, :, :20])


def test_scores_beyond_the_range_of_exp_do_not_overflow(small_blocks):
    q, k, v, _ = draw(20, 20)
    q, k = 1e3 * q, 1e3 * k
    want = sdpa(q.double(), k.double(), v.double()).float()
    torch.testing.assert_close(causal_attention(q, k, v, Attention.matmul), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("choice", [Attention.matmul, Attention.sdpa], ids=lambda choice: choice.value)
def test_an_empty_batch_gives_an_empty_output(choice):
    out = causal_attention(*draw(4, 4, batch=0)[:3], choice)
    assert out.shape == (0, 3, 4, 8)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("choice", [Attention.matmul, Attention.sdpa], ids=lambda choice: choice.value)
def test_dropout_drops_probabilities_by_the_key(choice, dtype):
    p, key = 0.3, DropoutKey(5, 2, torch.tensor([11, 4]))
    tensors = [t.to(dtype) for t in draw(13, 13)]

    def written_out(q, k, v):
        scores = q @ k.mT / math.sqrt(q.shape[-1]) + torch.full((13, 13), -math.inf).triu(1)
        mask = keep_mask(scores.shape, p, key)
        return scores.softmax(-1) * mask / (1 - p) @ v

    got = run(lambda *qkv: causal_attention(*qkv, choice, p, key), tensors, dtype)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, run(written_out, tensors, torch.float64), strict=True):
        error = (a.double() - b).abs().max() / b.abs().max()
        assert error < TOLERANCE[dtype]["out" if name == "out" else "grad"], f"{name}: {error:.1e}"
