"""The kernels behind the public functions, with their gradients, against the references in fp64.

What a kernel computes of any shape is tests/kernels; here it is wired into autograd, compilation and checkpointing.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gptlite.kernels.activation import ACTIVATIONS
from gptlite.ops.attention import causal_attention, heads, packed_causal_attention
from gptlite.ops.bias_activation import bias_activation
from gptlite.ops.config import Attention, CrossEntropy
from gptlite.ops.cross_entropy import LossTerms, VocabShard, linear_cross_entropy
from gptlite.ops.dropout import DropoutKey, dropout
from gptlite.ops.inputs import IGNORE
from gptlite.ops.layer_norm import NormParameters, layer_norm, residual_norm, rms_norm
from gptlite.ops.rope import frequencies, rope, rotary
from gptlite.ops.softmax import causal_softmax, masked_softmax

KEY = DropoutKey(5, 3, torch.tensor([7, 2**33 + 1]), first_position=4)
APART = DropoutKey(5, 3, torch.tensor([7, 2**33 + 1]), first_position=4, gap=6)
MASK = torch.rand(2, 1, 9, 12, generator=torch.Generator().manual_seed(3)) < 0.4
MASK[0, 0, 3] = True  # sees nothing
pytestmark = pytest.mark.usefixtures("kernels")
B, S, D = 2, 9, 20


def angles_of(positions: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = rotary(positions, frequencies(D, 100.0, positions.device))
    return cos[:, :, None, None], sin[:, :, None, None]


ANGLES, OTHER_ANGLES = angles_of(torch.arange(S)[None]), angles_of(torch.arange(B * S).view(B, S))


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


# name: (op of (fused, *tensors), tensors)
Op = Callable[..., Tensor | tuple[Tensor, ...]]
OPS: dict[str, tuple[Op, list[Tensor]]] = {
    "layer_norm": (lambda f, x, w, b: layer_norm(x, w, b, 1e-5, f), draw((B, S, D), (D,), (D,))),
    "layer_norm without bias": (lambda f, x, w: layer_norm(x, w, None, 1e-5, f), draw((B, S, D), (D,))),
    "residual_norm": (
        lambda f, x, r, w, b: residual_norm(x, r, NormParameters(w, b, 1e-5), 0.0, None, f),
        draw((B, S, D), (B, S, D), (D,), (D,)),
    ),
    "residual_norm with dropout": (
        lambda f, x, r, w: residual_norm(x, r, NormParameters(w, None, 1e-5), 0.3, KEY, f),
        draw((B, S, D), (B, S, D), (D,)),
    ),
    "residual_norm with dropout of two runs of positions": (
        lambda f, x, r, w: residual_norm(x, r, NormParameters(w, None, 1e-5), 0.3, APART, f),
        draw((B, S + 1, D), (B, S + 1, D), (D,)),
    ),
    "residual_norm with a bias": (
        lambda f, x, r, w, b, c: residual_norm(x, r, NormParameters(w, b, 1e-5), 0.3, KEY, f, x_bias=c),
        draw((B, S, D), (B, S, D), (D,), (D,), (D,)),
    ),
    "residual_norm with a bias and dropout of two runs of positions": (
        lambda f, x, r, w, b, c: residual_norm(x, r, NormParameters(w, b, 1e-5), 0.3, APART, f, x_bias=c),
        draw((B, S + 1, D), (B, S + 1, D), (D,), (D,), (D,)),
    ),
    "residual_norm whose sum nothing reads": (
        lambda f, x, r, w, b: residual_norm(x, r, NormParameters(w, None, 1e-5), 0.0, None, f, x_bias=b)[0],
        draw((B, S, D), (B, S, D), (D,), (D,)),
    ),
    "rms_norm": (lambda f, x, w: rms_norm(x, w, 1e-5, f), draw((B, S, D), (D,))),
    "rms_norm without weight": (lambda f, x: rms_norm(x, None, 1e-5, f), draw((B, S, D))),
    "rms_norm of a view": (lambda f, x, w: rms_norm(x[:, :, 1:3], w, 1e-5, f), draw((B, S, 4, D), (D,))),
    "residual rms_norm": (
        lambda f, x, r, w: residual_norm(x, r, NormParameters(w, None, 1e-5, rms=True), 0.0, None, f),
        draw((B, S, D), (B, S, D), (D,)),
    ),
    "residual rms_norm with a bias and dropout": (
        lambda f, x, r, w, b: residual_norm(x, r, NormParameters(w, None, 1e-5, rms=True), 0.3, KEY, f, x_bias=b),
        draw((B, S, D), (B, S, D), (D,), (D,)),
    ),
    "residual rms_norm without weight and with a bias": (
        lambda f, x, r, b: residual_norm(x, r, NormParameters(None, None, 1e-5, rms=True), 0.0, None, f, x_bias=b),
        draw((B, S, D), (B, S, D), (D,)),
    ),
    "residual rms_norm whose sum nothing reads": (
        lambda f, x, r, w: residual_norm(x, r, NormParameters(w, None, 1e-5, rms=True), 0.0, None, f)[0],
        draw((B, S, D), (B, S, D), (D,)),
    ),
    "dropout of two runs of positions": (lambda f, x: dropout(x, 0.3, APART, f), draw((B, S + 1, D))),
    **{
        f"bias_activation {kind}": (lambda f, x, b, kind=kind: bias_activation(x, b, kind, f), draw((B, S, D), (D,)))
        for kind in ACTIVATIONS
    },
    "bias_activation without bias": (lambda f, x: bias_activation(x, None, "gelu_erf", f), draw((B, S, D))),
    "bias_activation gated without bias": (lambda f, x: bias_activation(x, None, "swiglu", f), draw((B, S, D))),
    "rope": (lambda f, qkv: rope(qkv, ANGLES, fused=f), draw((B, S, 2, 4, D))),
    "rope of sequences with other positions": (lambda f, qkv: rope(qkv, OTHER_ANGLES, fused=f), draw((B, S, 2, 4, D))),
    "rope with QK norm": (
        lambda f, qkv, q, k: rope(qkv, ANGLES, (q, k), 1e-5, f),
        draw((B, S, 2, 4, D), (D,), (D,)),
    ),
    "QK norm without gains": (lambda f, qkv: rope(qkv, None, (None, None), 1e-5, f), draw((B, S, 1, 3, D))),
    "heads": (lambda f, qkv: heads(qkv, None, f), draw((B, S, 2, 3, 8))),
    "grouped heads": (lambda f, qkv: heads(qkv, None, f), draw((B, S, 2, 5, 7))),
    "dropout": (lambda f, x: dropout(x, 0.3, KEY, f), draw((B, S, D))),
    "dropout of heads": (lambda f, x: dropout(x, 0.3, KEY, f), draw((B, 3, S, 11))),
    "causal_softmax": (lambda f, x: causal_softmax(x, 0.3, f), draw((B, 3, S, 12))),
    "masked_softmax": (lambda f, x: masked_softmax(x, MASK, 0.3, f), draw((B, 3, S, 12))),
    "attention": (
        lambda f, *qkv: causal_attention(*qkv, Attention.fused if f else Attention.matmul),
        draw((B, 3, S, 8), (B, 3, 12, 8), (B, 3, 12, 8)),
    ),
    "packed attention": (
        lambda f, qkv: packed_causal_attention(qkv, Attention.fused if f else Attention.matmul),
        draw((B, S, 3, 3, 8)),
    ),
    "attention by softmax": (
        lambda f, *qkv: causal_attention(*qkv, Attention.fused_softmax if f else Attention.matmul),
        draw((B, 3, S, 8), (B, 3, 12, 8), (B, 3, 12, 8)),
    ),
    "attention with dropout": (
        lambda f, *qkv: causal_attention(*qkv, Attention.fused if f else Attention.matmul, 0.3, KEY),
        draw((B, 3, S, 8), (B, 3, 12, 8), (B, 3, 12, 8)),
    ),
    "attention with a mask": (
        lambda f, *qkv: causal_attention(*qkv, Attention.fused if f else Attention.matmul, mask=MASK),
        draw((B, 3, S, 8), (B, 3, 12, 8), (B, 3, 12, 8)),
    ),
}
# Largest error over the largest value of the fp64 result. bf16 has 8 bits, and what passes between two ops is rounded.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


def run(op: Op, fused: bool, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in tensors]
    outs = op(fused, *leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    weights = [torch.linspace(-1, 2, out.shape[-1]).to(dtype) for out in outs]
    total = torch.stack([(out * weight).sum() for out, weight in zip(outs, weights, strict=True)]).sum()
    return [*(out.detach() for out in outs), *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    op, tensors = OPS[name]
    rounded = [tensor.to(dtype) for tensor in tensors]  # the reference reads what the kernel reads
    got, want = run(op, True, rounded, dtype), run(op, False, rounded, torch.float64)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == dtype
        error = (a.double() - b).abs().max() / b.abs().max()
        assert error < TOLERANCE[dtype], f"result {index}: {error:.1e}"


@pytest.mark.parametrize("name", OPS)
def test_recomputation_gives_equal_gradients(name: str) -> None:
    op, tensors = OPS[name]
    again = run(lambda *args: checkpoint(op, *args, use_reentrant=False), True, tensors, torch.float32)
    for a, b in zip(again, run(op, True, tensors, torch.float32), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_an_op_compiles_into_a_single_graph(name: str) -> None:
    op, tensors = OPS[name]
    compiled = torch.compile(op, fullgraph=True)
    for a, b in zip(run(compiled, True, tensors, torch.float32), run(op, True, tensors, torch.float32), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


TERMS = [LossTerms(), LossTerms(z_loss=1e-2), LossTerms(softcap=2.0), LossTerms(z_loss=1e-3, softcap=5.0)]


def loss_and_gradients(choice, terms, hidden, weight, targets, dtype, cuts=()):
    leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (hidden, weight)]
    if not cuts:
        loss = linear_cross_entropy(*leaves, targets, 53, choice=choice, terms=terms)
        return [loss.detach(), *torch.autograd.grad(loss * 0.25, leaves)]
    # Ranks one after the other: the first round of each leaves its numbers, the second has all of them.
    heard: dict[int, Tensor] = {}
    for _ in range(2):
        results = []
        for first, last in cuts:

            def gather(mine, first=first):
                heard[first] = mine
                return torch.stack([heard.get(at, mine) for at, _ in cuts])

            shard = VocabShard(first, max(b - a for a, b in cuts), gather)
            own = [leaf.detach().requires_grad_() for leaf in (leaves[0], leaves[1][first:last])]
            loss = linear_cross_entropy(*own, targets, 53, shard, choice, terms)
            results.append([loss.detach(), *torch.autograd.grad(loss * 0.25, own)])
    losses, dhidden, dweight = zip(*results, strict=True)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    return [losses[0], torch.stack(dhidden).sum(0), torch.cat(dweight)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("cuts", [(), ((0, 20), (20, 40), (40, 64), (64, 64))], ids=["whole", "cut"])
@pytest.mark.parametrize("choice", [CrossEntropy.fused, CrossEntropy.chunked], ids=lambda choice: choice.value)
def test_the_loss_with_all_terms(choice, cuts, terms, dtype, products) -> None:
    hidden, weight = draw((37, 16), (64, 16))
    targets = torch.arange(37) % 53
    targets[::5] = IGNORE
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    want = loss_and_gradients(CrossEntropy.reference, terms, hidden, weight, targets, torch.float64)
    got = loss_and_gradients(choice, terms, hidden, weight, targets, dtype, cuts)
    for name, a, b in zip(("loss", "dhidden", "dweight"), got, want, strict=True):
        error = (a.double() - b).abs().max() / b.abs().max()
        assert error < {torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype], f"{name}: {error:.1e}"
