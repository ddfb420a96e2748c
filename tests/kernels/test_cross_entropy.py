"""Cross entropy against the formula in float64: whole, and in the two halves of ranks that share the columns."""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.backends import Backend
from kernels.cases import BF16, DTYPES, FP16, FP32, KINDS, WIDE, WIDTHS, each, generator, normal, on, rows_of, same_bits
from kernels.loop import loop_over
from kernels.options import Loss
from kernels.tolerances import ARGUMENT, ARITHMETIC, check

TOLERANCE = ARITHMETIC["cross_entropy"]
IGNORED = -100
PLAIN = Loss()
ALL = Loss(z_loss=1e-3, scale=0.3)
LOSSES = (PLAIN, Loss(z_loss=0.01), Loss(scale=1 / 3), ALL)


def targets_of(rows: int, columns: int, ignored: int = IGNORED) -> Tensor:
    """Some of them ignored; the first and the last column among the others."""
    targets = torch.randint(columns, (rows,), generator=generator(rows, columns))
    targets[-1] = columns - 1
    targets[0] = 0
    if rows > 2:
        targets[1::5] = ignored
    return targets


def reference(logits: Tensor, targets: Tensor, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and gradient in float64, and how far the losses may be off."""
    x = logits.double().requires_grad_()
    ignored = targets == loss.ignore_index
    log_sum = torch.logsumexp(x, -1)
    picked = x.gather(-1, targets.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
    losses = (log_sum - picked + loss.z_loss * log_sum**2).masked_fill(ignored, 0.0)
    (gradient,) = torch.autograd.grad(loss.scale * losses.sum(), x)
    with torch.no_grad():
        terms = log_sum.abs() + x.amax(-1).abs() + picked.abs() + loss.z_loss * log_sum**2
    return losses.detach(), gradient, terms


def check_gradient(actual: Tensor, expected: Tensor, logits: Tensor, targets: Tensor, loss: Loss) -> None:
    x = logits.double()
    log_sum = torch.logsumexp(x, -1, keepdim=True)
    ignored = (targets == loss.ignore_index).unsqueeze(-1)
    p = torch.exp(x - log_sum) * (1 + 2 * loss.z_loss * log_sum).abs()
    target = torch.zeros_like(x).scatter(-1, targets.masked_fill(ignored.squeeze(-1), 0).unsqueeze(-1), 1.0)
    largest = torch.where(x.isfinite(), x.abs(), 0.0).amax(-1, keepdim=True)
    terms = (p * (TOLERANCE + ARGUMENT * largest) + target * TOLERANCE).masked_fill(ignored, 0.0)
    terms *= loss.scale
    check("gradient", actual, expected, terms, 1.0)


def check_whole(backend: Backend, logits: Tensor, targets: Tensor, loss: Loss, padding: int = 0) -> None:
    expected, gradient, terms = reference(logits, targets, loss)
    losses, actual = backend.cross_entropy(logits, targets, loss, True, padding)
    check("losses", losses, expected, terms, TOLERANCE)
    check_gradient(actual, gradient, logits, targets, loss)
    ignored = targets == loss.ignore_index
    assert (losses[ignored] == 0).all()
    assert (actual[ignored] == 0).all()
    assert same_bits(backend.cross_entropy(logits, targets, loss, False, padding)[0], losses)


SIZES = [*((4, columns) for columns in WIDTHS), *((2, columns) for columns in WIDE), (1, 33), (7, 1), (500, 70)]
CORE_SIZES = [(1, 1), (4, 33), (2, 777), (30, 17), (1, 8193)]


@each(
    "size,dtype,loss",
    [(s, d, loss) for s in SIZES for d in DTYPES for loss in (PLAIN, ALL)],
    [(s, DTYPES[i % 3], (PLAIN, ALL)[i % 2]) for i, s in enumerate((*CORE_SIZES, *CORE_SIZES[1:]))],
)
def test_sizes(backend: Backend, size, dtype, loss) -> None:
    check_whole(backend, normal(size, dtype, "x") * 3, targets_of(*size), loss)


@each("loss,dtype", [(loss, d) for loss in LOSSES for d in DTYPES], [(loss, FP32) for loss in LOSSES])
@loop_over("columns", [5, 1000])
@loop_over("padding", [1, 8])
def test_options_and_padded_rows(backend: Backend, loss, dtype, columns, padding) -> None:
    check_whole(backend, normal((6, columns), dtype, "x") * 2, targets_of(6, columns), loss, padding)


def check_e5m2(actual: Tensor, expected: Tensor, ignored: Tensor) -> None:
    """The gradient rounded: the same number but where fp32 is as near to another."""
    most = torch.finfo(torch.float8_e5m2).max
    want = expected.clamp(-most, most).float().to(torch.float8_e5m2)
    got, exact = actual.double(), expected.clamp(-most, most)
    unit = torch.ldexp(torch.ones_like(exact), torch.frexp(exact)[1].clamp(min=-13) - 3)  # of 2 fraction bits
    assert ((got - exact).abs() <= (0.5 + 1e-4) * unit).all()
    assert (actual.float() != want.float()).double().mean() < 1e-3
    assert (actual.view(torch.uint8)[ignored] & 0x7F == 0).all()


@each(
    "columns,loss",
    [(c, loss) for c in (1, 5, 16, 777, 8192, 50257) for loss in (PLAIN, ALL)],
    [(5, PLAIN), (777, ALL), (9000, PLAIN)],
)
@loop_over("scale", [1.0, 2.0**15, 2.0**16])
@loop_over("padding", [0, 24])
def test_the_gradient_in_e5m2(backend: Backend, columns, loss, scale, padding) -> None:
    """With the factor that the head uses and twice that, which exceeds the largest number; in two halves, too."""
    logits, targets = normal((12, columns), BF16, "x") * 3, targets_of(12, columns)
    loss, ignored = replace(loss, scale=scale), targets == IGNORED
    expected, gradient, terms = reference(logits, targets, loss)
    losses, actual = backend.cross_entropy_e5m2(logits, targets, loss, None, padding)
    check("losses", losses, expected, terms, TOLERANCE)
    check_e5m2(actual, gradient, ignored)
    log_sum = torch.logsumexp(logits.double(), -1).float()
    _, cut_gradient = backend.cross_entropy_e5m2(logits, targets, loss, log_sum, padding)
    check_e5m2(cut_gradient, gradient, ignored)


@on()
def test_nan_stays_nan_in_e5m2(backend: Backend) -> None:
    logits, targets = normal((4, 40), BF16, "x"), torch.zeros(4, dtype=torch.int64)
    logits[1, 3] = float("nan")
    losses, gradient = backend.cross_entropy_e5m2(logits, targets, PLAIN)
    assert losses.isnan().tolist() == [False, True, False, False]
    assert gradient.float().isnan().any(1).tolist() == [False, True, False, False]


@on()
def test_any_number_may_say_ignored(backend: Backend) -> None:
    for ignored in (3, -1, 10**12):
        check_whole(backend, normal((8, 40), FP32, "x"), targets_of(8, 40, ignored), replace(ALL, ignore_index=ignored))


@each("kind,dtype", [(k, d) for k in KINDS for d in DTYPES], [("large", BF16), ("big_mean", FP32), ("outlier", FP16)])
@loop_over("columns", [31, 5000])
def test_values_of_all_kinds(backend: Backend, kind, dtype, columns) -> None:
    for loss in (PLAIN, ALL):
        check_whole(backend, rows_of(kind, 4, columns, dtype), targets_of(4, columns), loss)


@on()
@loop_over("columns", [1, 45, 3000])
def test_nan_and_infinity(backend: Backend, columns) -> None:
    logits, targets = normal((6, columns), FP32, "x"), torch.zeros(6, dtype=torch.int64)
    logits[1, columns // 2], logits[2, columns - 1], logits[3] = float("nan"), float("inf"), -float("inf")
    if columns > 1:
        logits[4, 1:] = -float("inf")  # as vocabularies are masked
    losses, gradient = backend.cross_entropy(logits.clone(), targets, PLAIN)
    assert losses[1:4].isnan().all()
    assert gradient[1].isnan().all()
    good = [0, 4, 5]
    expected, expected_gradient, terms = reference(logits[good], targets[good], PLAIN)
    check("losses", losses[good], expected, terms, TOLERANCE)
    check_gradient(gradient[good], expected_gradient, logits[good], targets[good], PLAIN)


def cut(columns: int, parts: int) -> list[tuple[int, int]]:
    size = -(-columns // parts)
    return [(min(columns, i * size), min(columns, (i + 1) * size)) for i in range(parts)]


def together(stats: list[Tensor], targets: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Losses and log sums of what the ranks say, in float64."""
    log_sums, picked = torch.stack(stats).double().unbind(-1)
    log_sum = torch.logsumexp(log_sums, 0)
    losses = log_sum - picked.sum(0) + loss.z_loss * log_sum**2
    return losses.masked_fill(targets == loss.ignore_index, 0.0), log_sum.float()


@each(
    "columns,parts,dtype",
    [(c, n, d) for c in (1, 7, 33, 1000, 50257) for n in (1, 2, 3, 8) for d in DTYPES],
    [(7, 3, FP32), (33, 2, BF16), (1000, 3, FP16), (2, 3, FP32)],
)
@loop_over("loss", [PLAIN, ALL])
def test_cut_columns_are_the_whole(backend: Backend, columns, parts, dtype, loss) -> None:
    logits, targets = normal((6, columns), dtype, "x") * 3, targets_of(6, columns)
    expected, gradient, terms = reference(logits, targets, loss)
    places = cut(columns, parts)
    cuts = [replace(loss, first=first) for first, _ in places]
    pieces = [logits[:, first:last] for first, last in places]
    stats = [
        backend.cross_entropy_stats(piece, targets, each, padding=3) for piece, each in zip(pieces, cuts, strict=True)
    ]
    check_stats(stats, pieces, targets, places)
    losses, log_sum = together(stats, targets, loss)
    check("losses", losses.float(), expected, terms, 2 * TOLERANCE)
    gradients = [
        backend.cross_entropy_gradient(piece, targets, log_sum, each, padding=3)
        for piece, each in zip(pieces, cuts, strict=True)
    ]
    check_gradient(torch.cat(gradients, 1), gradient, logits, targets, loss)


def check_stats(stats: list[Tensor], pieces: list[Tensor], targets: Tensor, places: list[tuple[int, int]]) -> None:
    kept = targets != IGNORED
    for each_, piece, (first, last) in zip(stats, pieces, places, strict=True):
        x = piece.double()
        here = (targets >= first) & (targets < last)
        index = (targets - first).masked_fill(~here, 0).unsqueeze(-1)
        picked = (
            x.gather(-1, index).squeeze(-1).masked_fill(~here, 0.0) if last > first else torch.zeros(len(x)).double()
        )
        log_sum = torch.logsumexp(x, -1)
        largest = x.abs().amax(-1) if last > first else 0.0
        check("log_sum", each_[:, 0], log_sum, log_sum.abs().nan_to_num(posinf=0.0) + largest, TOLERANCE)
        assert torch.equal(each_[kept, 1].double(), picked[kept])


@on()
def test_stats_of_no_finite_logit(backend: Backend) -> None:
    logits, targets = torch.full((2, 20), -float("inf")), torch.tensor([30, 31])
    stats = backend.cross_entropy_stats(logits, targets, PLAIN)
    assert (stats[:, 0] == -float("inf")).all()
    gradient = backend.cross_entropy_gradient(logits, targets, torch.tensor([1.0, 2.0]), PLAIN)
    assert (gradient == 0).all()


@on()
def test_a_target_of_no_column_harms_no_other_row(backend: Backend) -> None:
    """Its own loss means nothing; nothing past the row is read or written."""
    logits = normal((6, 30), FP32, "x")
    targets = torch.tensor([0, 30, -1, 10**12, -(10**12), 29])
    losses, gradient = backend.cross_entropy(logits, targets, PLAIN, padding=2)
    good = [0, 5]
    expected, expected_gradient, terms = reference(logits[good], targets[good], PLAIN)
    check("losses", losses[good], expected, terms, TOLERANCE)
    check_gradient(gradient[good], expected_gradient, logits[good], targets[good], PLAIN)


@on()
def test_empty_tensors(backend: Backend) -> None:
    none = torch.empty(0, dtype=torch.int64)
    losses, gradient = backend.cross_entropy(torch.empty(0, 9), none, ALL)
    assert losses.shape == (0,)
    assert gradient.shape == (0, 9)
    assert backend.cross_entropy_stats(torch.empty(0, 9), none, ALL).shape == (0, 2)
    two = torch.zeros(2, dtype=torch.int64)
    stats = backend.cross_entropy_stats(torch.empty(2, 0), two, Loss(first=9), padding=1)
    assert torch.equal(stats, torch.tensor([[-float("inf"), 0.0]] * 2))
    gradient = backend.cross_entropy_gradient(torch.empty(2, 0), two, torch.ones(2), Loss(first=9), 1)
    assert gradient.shape == (2, 0)


@each("dtype", DTYPES, (FP32, BF16))
@loop_over("columns", [6, 65, 1030])
@loop_over("offsets", [(1,), (0, 1), (3, 0, 2)])
def test_any_alignment(backend: Backend, dtype, columns, offsets) -> None:
    """On a CPU the bits are the same; on a GPU it is the alignment that says which thread sums what."""
    logits, targets, loss = normal((5, columns), dtype, "x"), targets_of(5, columns), ALL
    log_sum = torch.logsumexp(logits.double(), -1).float()
    _, gradient, _ = reference(logits, targets, loss)
    plain = everything(backend, logits, targets, log_sum, loss, 0)
    for padding in (0, 1):  # rows of their own alignment each
        shifted = backend.having(offsets=offsets)
        check_whole(shifted, logits, targets, loss, padding)
        results = everything(shifted, logits, targets, log_sum, loss, padding)
        check_stats([results[2]], [logits], targets, [(0, columns)])
        check_gradient(results[3], gradient, logits, targets, loss)
        assert not backend.is_cpu or all(same_bits(a, b) for a, b in zip(plain, results, strict=True))


def everything(backend: Backend, logits, targets, log_sum, loss: Loss, padding: int) -> list[Tensor]:
    stats = backend.cross_entropy_stats(logits, targets, loss, padding)
    gradient = backend.cross_entropy_gradient(logits, targets, log_sum, loss, padding)
    return [*backend.cross_entropy(logits, targets, loss, True, padding), stats, gradient]
