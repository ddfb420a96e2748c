"""The output head in fp8 on the device, against the same rounding written out in float64 on a CPU."""

import pytest
import torch
from ops.test_fp8_head import FP8, VOCAB, check, draw, run, written_out

from gptlite.kernels.library import LoadedLibrary, load
from gptlite.ops import fp8
from gptlite.ops.config import CrossEntropy
from gptlite.ops.cross_entropy import NO_TERMS, PLAIN_GEMMS, LossGradient, LossTerms, linear_cross_entropy
from gpu.device import DEVICE


@pytest.fixture(autouse=True)
def ready() -> None:
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs sm_89")
    loaded = load(DEVICE.type)
    assert isinstance(loaded, LoadedLibrary), loaded.reason


@pytest.mark.parametrize("choice", [CrossEntropy.chunked, CrossEntropy.fused], ids=lambda each: each.value)
@pytest.mark.parametrize("terms", [NO_TERMS, LossTerms(z_loss=1e-3)], ids=["plain", "z-loss"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_each_product_is_that_of_rounded_operands(choice, terms, known):
    upstream, given = 1 / 43, draw()
    gradient = LossGradient(upstream if known else None)
    there = [each.to(DEVICE) for each in given]
    got = run(*there, upstream, choice=choice, terms=terms, known=gradient)
    check([each.cpu() for each in got], written_out(*given, terms), upstream)


@pytest.mark.parametrize("shape", [(16, 16), (1, 784), (50, 784), (513, 2064)], ids=str)
def test_a_transpose_has_the_same_bytes(shape):
    """Compiled for all shapes once."""
    x = torch.randint(256, shape, dtype=torch.uint8, device=DEVICE).view(fp8.GRADIENT)
    found = fp8.transposed(x)
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.uint8), x.view(torch.uint8).t())


def test_gpt2s_vocabulary_is_as_near_to_bf16_as_three_bits_allow():
    """4,096 tokens of GPT-3 Small's width, whose logits fill two rows of a multiprocessor's shared memory."""
    tokens, width, rows = (4096, 768, 50304) if DEVICE.type == "cuda" else (64, 64, VOCAB)
    vocab = 50257 if DEVICE.type == "cuda" else VOCAB
    hidden = torch.randn(tokens, width, device=DEVICE).bfloat16()
    weight = 0.02 * torch.randn(rows, width, device=DEVICE)
    targets = torch.randint(vocab, (tokens,), device=DEVICE)
    results = []
    for gemms in (PLAIN_GEMMS, FP8):
        leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
        options = {"choice": CrossEntropy.fused, "gemms": gemms, "known": LossGradient(1 / tokens)}
        loss = linear_cross_entropy(*leaves, targets, vocab, **options)
        (loss / tokens).backward()
        results.append([loss.detach().double(), *(each.grad.double() for each in leaves)])
    for got, want in zip(results[1], results[0], strict=True):
        assert (got - want).norm() <= 0.06 * want.norm()
    assert results[1][0].item() == pytest.approx(results[0][0].item(), rel=1e-3)
    assert torch.count_nonzero(results[1][2][vocab:]) == 0


def test_operands_that_are_kept_give_the_same_bits():
    hidden, weight, targets = (each.to(DEVICE) for each in draw())
    want = run(hidden, weight, targets, 1.0, choice=CrossEntropy.fused)
    parameter = torch.nn.Parameter(weight.clone())
    parameter.fp8_operands = fp8.KeptOperands()
    for _ in range(2):
        hidden_leaf = hidden.clone().requires_grad_()
        parameter.grad = None
        loss = linear_cross_entropy(hidden_leaf, parameter, targets, VOCAB, choice=CrossEntropy.fused, gemms=FP8)
        loss.backward()
        assert torch.equal(loss.detach(), want[0])
        assert torch.equal(hidden_leaf.grad, want[1])
        assert torch.equal(parameter.grad, want[2])
