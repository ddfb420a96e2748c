"""The head and its loss in one op, against the same written out in fp64."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from gptlite.ops import config, cross_entropy
from gptlite.ops.config import CrossEntropy
from gptlite.ops.cross_entropy import LossGradient, linear_cross_entropy

TOKENS, WIDTH, VOCAB, PADDED = 37, 16, 53, 64
# Largest error over the largest value of the fp64 result. In bf16 the logits and their gradient are each rounded once.
TOLERANCE = {torch.float32: {"loss": 1e-6, "grad": 2e-6}, torch.bfloat16: {"loss": 2e-3, "grad": 1e-2}}

BF16 = 2.0**-7  # a unit in the last place, relative

pytestmark = pytest.mark.usefixtures("kernels", "products")


def draw(tokens: int = TOKENS, scale: float = 1.0):
    generator = torch.Generator().manual_seed(1)
    hidden = scale * torch.randn(tokens, WIDTH, generator=generator)
    weight = torch.randn(PADDED, WIDTH, generator=generator)
    targets = torch.randint(VOCAB, (tokens,), generator=generator)
    targets[::5] = cross_entropy.IGNORE
    return hidden, weight, targets


def run(loss_of, hidden, weight, targets, dtype, upstream=1.0):
    leaves = [t.to(dtype, copy=True).requires_grad_() for t in (hidden, weight)]
    before = [t.detach().clone() for t in (*leaves, targets)]
    loss = loss_of(*leaves, targets)
    (loss * upstream).backward()
    torch.testing.assert_close([*leaves, targets], before, rtol=0, atol=0, equal_nan=True)
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def fused(hidden, weight, targets):
    return linear_cross_entropy(hidden, weight, targets, VOCAB)


def written_out(hidden, weight, targets):
    return F.cross_entropy(hidden @ weight[:VOCAB].T, targets, ignore_index=-100, reduction="sum")


def check(hidden, weight, targets, dtype, upstream=1.0):
    hidden, weight = hidden.to(dtype), weight.to(dtype)  # the reference reads what the op reads
    got = run(fused, hidden, weight, targets, dtype, upstream)
    want = run(written_out, hidden, weight, targets, torch.float64, upstream)
    assert got[0].dtype == torch.float32
    for name, a, b in zip(("loss", "dhidden", "dweight"), got, want, strict=True):
        error = (a.double() - b).abs().max() / b.abs().max()
        assert error < TOLERANCE[dtype]["loss" if name == "loss" else "grad"], f"{name}: {error:.1e}"
    return got


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.float16], ids=str)
@pytest.mark.parametrize("upstream", [1.0, 1 / 4096, 1 / 37, -3.0])
@pytest.mark.parametrize("known", [1.0, 1 / 37, 100.0])
@pytest.mark.parametrize("choice", [CrossEntropy.chunked, CrossEntropy.fused], ids=lambda choice: choice.value)
def test_gradients_do_not_depend_on_the_known_upstream_gradient(dtype, upstream, known, choice):
    def loss_of(*given, gradient):
        return linear_cross_entropy(*given, VOCAB, choice=choice, known=gradient)

    results = [
        run(partial(loss_of, gradient=gradient), *draw(), dtype, upstream)
        for gradient in (LossGradient(known), LossGradient())
    ]
    assert torch.equal(results[0][0], results[1][0])
    for a, b in zip(results[0][1:], results[1][1:], strict=True):
        error = (a.double() - b.double()).abs().max() / b.double().abs().max()
        assert error < {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-12}[dtype], f"{error:.1e}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("logit_rows", [1, 7, TOKENS, 1000])
@pytest.mark.parametrize("softmax_rows", [1, 3, 1000])
def test_any_number_of_chunks_matches_the_reference(monkeypatch, dtype, logit_rows, softmax_rows):
    monkeypatch.setitem(config.LOGIT_BYTES, "cpu", logit_rows * VOCAB * dtype.itemsize)
    monkeypatch.setattr(config, "CHUNK_ROWS", 1)
    monkeypatch.setitem(config.SOFTMAX_BYTES, "cpu", softmax_rows * VOCAB * 4)
    check(*draw(), dtype)


def test_no_more_logits_than_a_chunk_exist_at_once(monkeypatch, products):
    sizes = []
    of = cross_entropy._Loss.of
    columns = PADDED if products == "aligned" else VOCAB
    monkeypatch.setattr(config, "CHUNK_ROWS", 2)
    monkeypatch.setitem(config.LOGIT_BYTES, "cpu", 11 * columns * 4)
    monkeypatch.setattr(
        cross_entropy._Loss, "of", lambda self, x, *rest, **more: (sizes.append(len(x)), of(self, x, *rest, **more))[1]
    )
    run(fused, *draw(), torch.float32)
    assert sizes == ([10, 10, 10, 7] if products == "aligned" else [11, 11, 11, 4])


def test_the_logits_of_a_gpus_micro_batch_are_one_chunk():
    rows = config.logit_rows("cuda", 16 * 2048, 50304, 2)
    assert rows == 16 * 2048
    for tokens, chunks in ((42_624, 1), (42_752, 2), (100_000, 3)):
        rows = config.logit_rows("cuda", tokens, 50304, 2)
        assert -(-tokens // rows) == chunks
        assert rows % 128 == 0
        assert (chunks - 1) * rows < tokens <= chunks * rows
        assert tokens - (chunks - 1) * rows > 0.99 * rows, "a small chunk at the end"
        assert rows * 50304 * 2 <= 4 * 2**30 + 128 * 50304 * 2


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [VOCAB, 56, 61, PADDED])
@pytest.mark.parametrize("choice", [CrossEntropy.chunked, CrossEntropy.fused], ids=lambda choice: choice.value)
def test_padded_products_give_what_sliced_ones_do(monkeypatch, choice, rows, dtype):
    """With a table of any number of rows, whatever is in its padding; without gradients, too."""
    hidden, weight, targets = draw()
    weight = weight[:rows].clone()
    loss_of = partial(linear_cross_entropy, vocab_size=VOCAB, choice=choice)
    monkeypatch.setitem(config.PRODUCTS, "cpu", config.Products())
    want = run(loss_of, hidden, weight, targets, dtype)
    monkeypatch.setitem(config.PRODUCTS, "cpu", config.ON_GPU)
    weight[VOCAB:] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30]).repeat(4).unsqueeze(1)[: rows - VOCAB]
    got = run(loss_of, hidden, weight, targets, dtype)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-6 if dtype == torch.float32 else BF16, atol=1e-6)
    assert torch.count_nonzero(got[2][VOCAB:]) == 0
    ignored = targets == cross_entropy.IGNORE
    assert torch.count_nonzero(got[1][ignored]) == 0
    assert got[1][~ignored].abs().amax(1).min() > 0
    leaves = [each.to(dtype).requires_grad_() for each in (hidden, weight)]
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert torch.equal(loss_of(*leaves, targets), got[0])


def test_a_table_in_fp32_gets_its_gradient_in_fp32(products):
    hidden, weight, targets = draw()
    leaves = [hidden.bfloat16().requires_grad_(), weight.clone().requires_grad_()]
    fused(*leaves, targets).backward()
    want = run(fused, hidden, weight, targets, torch.bfloat16)
    assert leaves[1].grad.dtype == torch.float32
    assert torch.equal(leaves[0].grad, want[1])
    torch.testing.assert_close(leaves[1].grad, want[2].float(), rtol=BF16 / 2, atol=0)
    rounded = torch.equal(leaves[1].grad, leaves[1].grad.bfloat16().float())
    assert rounded == (products == "sliced"), "a GPU's product is not to be rounded to bf16"


@pytest.mark.parametrize(("rows", "dtype"), [(TOKENS, torch.bfloat16), (8, torch.float32)])
def test_the_gradient_of_the_table_is_summed_in_fp32_only_over_several_chunks(monkeypatch, rows, dtype):
    """A single chunk needs no fp32 table, which would take twice the memory."""
    dtypes, product = set(), cross_entropy.product
    monkeypatch.setitem(config.PRODUCTS, "cpu", config.ON_GPU)
    monkeypatch.setattr(cross_entropy, "logit_rows", lambda *_: rows)
    monkeypatch.setattr(cross_entropy, "product", lambda a, b, c, *rest: dtypes.add(c) or product(a, b, c, *rest))
    run(fused, *draw(), torch.bfloat16)
    assert dtypes == {dtype}


def test_long_rows_are_reduced_one_at_a_time(monkeypatch):
    monkeypatch.setitem(cross_entropy.SOFTMAX_BYTES, "cpu", 4 * VOCAB)
    for columns, rows in ((VOCAB // 3, 3), (VOCAB, 1), (VOCAB + 1, 1)):
        blocks = [len(block) for (block,) in cross_entropy._cache_sized(torch.zeros(6, columns))]
        assert blocks == [rows] * (6 // rows)


@pytest.mark.parametrize("tokens", [0, TOKENS], ids=["empty", "all_ignored"])
def test_ignored_targets_give_zero_loss_and_zero_gradients(tokens):
    hidden, weight, targets = draw(tokens)
    loss, dhidden, dweight = run(fused, hidden, weight, targets.fill_(cross_entropy.IGNORE), torch.float32)
    assert loss == 0
    assert dhidden.shape == hidden.shape
    assert torch.count_nonzero(dhidden) == torch.count_nonzero(dweight) == 0


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_logits_beyond_the_range_of_exp_keep_a_finite_loss(dtype):
    loss, *_ = check(*draw(scale=1e4), dtype)
    assert loss > 1e5


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient_and_the_other_does(frozen):
    hidden, weight, targets = draw()
    want = dict(zip(("hidden", "weight"), run(fused, hidden, weight, targets, torch.float32)[1:], strict=True))
    inputs = {"hidden": hidden, "weight": weight}
    trained = "weight" if frozen == "hidden" else "hidden"
    inputs[trained].requires_grad_()
    fused(inputs["hidden"], inputs["weight"], targets).backward()
    assert torch.equal(inputs[trained].grad, want[trained])
    assert inputs[frozen].grad is None


def test_a_backward_pass_in_two_halves_gives_the_gradients_of_one():
    """As a zero-bubble schedule takes them; a pass with another upstream gradient scales them anew."""
    hidden, weight, targets = draw()
    (whole,) = torch.autograd.grad(fused(hidden.requires_grad_(), weight.requires_grad_(), targets) / 7, [weight])
    loss = fused(hidden, weight, targets)
    (first,) = torch.autograd.grad(loss / 7, [hidden], retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss / 7, [weight], retain_graph=True)
    torch.testing.assert_close(second, whole, rtol=1e-6, atol=0)
    (third,) = torch.autograd.grad(loss / 14, [hidden])
    torch.testing.assert_close(third, kept / 2, rtol=1e-6, atol=0)
    assert torch.equal(first, kept)


@pytest.mark.parametrize("target", [VOCAB, PADDED, -1])
def test_a_target_outside_the_vocabulary_is_refused(target):
    hidden, weight, targets = draw()
    targets[3] = target
    with pytest.raises(RuntimeError, match="out of bounds"):
        fused(hidden, weight, targets)
