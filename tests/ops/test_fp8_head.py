"""The output head in fp8 against the same rounding written out in float64, in one piece, in chunks and on shards."""

from itertools import pairwise

import pytest
import torch
from ops.test_fp8 import BF16, CPU, e4m3, rounded
from torch import Tensor

from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.model import GPT
from gptlite.models.model import Model
from gptlite.models.parallelize import parallelize
from gptlite.ops import config, fp8
from gptlite.ops.config import CrossEntropy
from gptlite.ops.cross_entropy import (
    NO_TERMS,
    HeadGemms,
    LossGradient,
    LossTerms,
    VocabShard,
    linear_cross_entropy,
)
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.precision import Precision, PrecisionConfig, resolve_precision

TOKENS, WIDTH, VOCAB, ROWS = 50, 64, 777, 784
FP8 = HeadGemms(fp8=True)
IGNORE = -100
CHOICES = [CrossEntropy.chunked, CrossEntropy.fused]


@pytest.fixture(autouse=True)
def kernels() -> None:
    from gptlite.kernels.library import LoadedLibrary, load

    if not isinstance(load("cpu"), LoadedLibrary):
        pytest.skip("no kernels")


def draw() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a weight with NaN in its padding, and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).bfloat16()
    weight = torch.randn(ROWS, WIDTH, generator=generator) * 0.3
    weight[VOCAB:] = torch.nan
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    targets[3::7], targets[0], targets[1] = IGNORE, 0, VOCAB - 1
    return hidden, weight, targets


def written_out(hidden: Tensor, weight: Tensor, targets: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients, with operands rounded to fp8 and logits to bf16; the logits' gradient has a fixed scale."""
    left, right = e4m3(hidden), e4m3(weight[:VOCAB].bfloat16())
    logits = (left @ right.t()).bfloat16().double()
    cap = terms.softcap
    capped = (cap * torch.tanh(logits / cap)).bfloat16().double() if cap else logits
    log_sum, kept = capped.logsumexp(1), targets != IGNORE
    index = targets.masked_fill(~kept, 0).unsqueeze(1)
    losses = log_sum - capped.gather(1, index).squeeze(1) + terms.z_loss * log_sum.square()
    gradient = (capped - log_sum.unsqueeze(1)).exp() * (1 + 2 * terms.z_loss * log_sum).unsqueeze(1)
    gradient.scatter_add_(1, index, torch.full_like(gradient[:, :1], -1.0))
    if cap:
        gradient *= 1 - torch.tanh(logits / cap).square()
    gradient[~kept] = 0.0
    # A scale of 2^-15 by hand: `rounded` takes amax / largest as the scale.
    marked = torch.cat([gradient.flatten(), torch.tensor([57344 / 2.0**15], dtype=torch.float64)])
    gradient = rounded(marked, 2, -14, 57344.0)[:-1].view_as(gradient)
    return losses[kept].sum(), gradient @ right, gradient.t() @ left


def run(hidden: Tensor, weight: Tensor, targets: Tensor, upstream: float, **options) -> tuple[Tensor, Tensor, Tensor]:
    leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
    loss = linear_cross_entropy(*leaves, targets, VOCAB, gemms=FP8, **options)
    (loss * upstream).backward()
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(*leaves, targets, VOCAB, gemms=FP8, **options), loss)
    return loss.detach(), leaves[0].grad, leaves[1].grad


def check(got: tuple[Tensor, Tensor, Tensor], want: tuple[Tensor, Tensor, Tensor], upstream: float) -> None:
    """Loss, hidden's gradient (bf16) and the weight's (fp32), by the largest of each."""
    assert got[0].item() == pytest.approx(want[0].item(), rel=1e-5)
    for mine, exact, unit in zip(got[1:], want[1:], (BF16, 2e-4), strict=True):
        exact = exact * upstream
        error = (mine[: len(exact)].double() - exact).abs().max() / exact.abs().max()
        assert error < unit, f"{error:.1e}"
    assert torch.count_nonzero(got[2][VOCAB:]) == 0


@pytest.mark.parametrize("choice", [*CHOICES, CrossEntropy.reference], ids=lambda each: each.value)
@pytest.mark.parametrize("terms", [NO_TERMS, LossTerms(z_loss=1e-3)], ids=["plain", "z-loss"])
@pytest.mark.parametrize("upstream", [1 / 43, 2.0**16 / 43], ids=["mean", "scaled"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_each_product_is_that_of_rounded_operands(choice, terms, upstream, known):
    """With ignored targets, NaN in the padding, a vocabulary that is no multiple of 16, and a loss scale."""
    given = draw()
    gradient = LossGradient(upstream if known else None)
    check(run(*given, upstream, choice=choice, terms=terms, known=gradient), written_out(*given, terms), upstream)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda each: each.value)
def test_a_softcap_is_differentiated_before_the_rounding(choice):
    """Its derivative is rounded to bf16, too."""
    given = draw()
    got, want = run(*given, 1.0, choice=choice, terms=LossTerms(softcap=5.0)), written_out(*given, LossTerms(0.0, 5.0))
    assert got[0].item() == pytest.approx(want[0].item(), rel=1e-3)
    for mine, exact in zip(got[1:], want[1:], strict=True):
        error = (mine[: len(exact)].double() - exact).norm() / exact.norm()
        assert error < 0.03, f"{error:.1e}"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda each: each.value)
def test_chunks_have_their_own_scale_and_sum_up_in_fp32(monkeypatch, choice, device):
    given = draw()
    whole = run(*given, 1 / 43, choice=choice)
    monkeypatch.setitem(config.PRODUCTS, "cpu", config.PRODUCTS[device])
    monkeypatch.setattr(config, "CHUNK_ROWS", 1)
    monkeypatch.setitem(config.LOGIT_BYTES, "cpu", 9 * ROWS * 2)
    parts = run(*given, 1 / 43, choice=choice)
    assert parts[0].item() == pytest.approx(whole[0].item(), rel=2e-3)
    for a, b in zip(parts[1:], whole[1:], strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert 0 < error < 0.05


@pytest.mark.parametrize("choice", CHOICES, ids=lambda each: each.value)
@pytest.mark.parametrize("cuts", [(0, 400, 784), (0, 16, 768, 784), (0, 768, 780, 784)], ids=str)
def test_shards_of_the_vocabulary_give_the_loss_of_the_whole(choice, cuts):
    """The last shard of the third case is padding alone, and no shard has a multiple of 16 rows."""
    hidden, weight, targets = draw()
    weight[:, 0] = 0  # every shard has the same amax in column 1, and so the scale of the whole
    weight[:, 1] = torch.where(weight[:, 2] > 0, 2.0, -2.0)
    hidden[:, 1] = 0
    weight[VOCAB:] = torch.nan
    want = run(hidden, weight, targets, 1 / 43, choice=choice)
    places = list(pairwise(cuts))
    longest = max(last - first for first, last in places)
    stats: list[Tensor] = []

    def shares(gather) -> list[tuple[Tensor, Tensor, Tensor]]:
        found = []
        for first, last in places:
            shard = VocabShard(first, longest, gather)
            leaves = [hidden.clone().requires_grad_(), weight[first:last].clone().requires_grad_()]
            loss = linear_cross_entropy(*leaves, targets, VOCAB, shard, choice, gemms=FP8, known=LossGradient(1 / 43))
            (loss / 43).backward()
            found.append((loss.detach(), leaves[0].grad, leaves[1].grad))
        return found

    shares(lambda each: (stats.append(each.clone()), each.unsqueeze(0))[1])
    everywhere = torch.stack(stats)
    got = shares(lambda _: everywhere)
    assert all(torch.equal(each[0], got[0][0]) for each in got)
    assert got[0][0].item() == pytest.approx(want[0].item(), rel=1e-5)
    hidden_gradient = sum(each[1].double() for each in got)
    weight_gradient = torch.cat([each[2] for each in got]).double()
    for a, b, unit in ((hidden_gradient, want[1], 3 * BF16), (weight_gradient, want[2], 1e-3)):
        error = (a - b.double()).abs().max() / b.double().abs().max()
        assert error < unit, f"{error:.1e}"


def test_only_the_head_is_in_fp8_beside_blocks_in_bf16(monkeypatch):
    """Of each micro-batch three products; those of the blocks, and logits that are returned, stay in bf16."""
    shapes, multiply = [], fp8.scaled_mm

    def product(a: Tensor, b: Tensor, *rest) -> Tensor:
        shapes.append((a.dtype, *a.shape, b.shape[1]))
        return multiply(a, b, *rest)

    monkeypatch.setattr(fp8, "scaled_mm", product)
    model_config = GPTConfig(vocab_size=50, num_layers=2, num_heads=2, d_model=32, sequence_length=8)
    policy = resolve_precision(PrecisionConfig(Precision.bf16, fp8_head=True), CPU)
    model = Model.of(model_config, policy)
    whole = GPT(model_config)
    rows = whole.head.weight.shape[0]
    (part,) = parallelize(model, whole, Mesh(CPU), ParallelismConfig(), policy)
    tokens = torch.randint(50, (2, 8))
    part(tokens, tokens).backward()
    e4, e5 = torch.float8_e4m3fn, torch.float8_e5m2
    assert shapes == [(e4, 16, 32, rows), (e5, 16, rows, 32), (e5, rows, 16, 32)]
    shapes.clear()
    part(tokens, None)
    assert shapes == []
