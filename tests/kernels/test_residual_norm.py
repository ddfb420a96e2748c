"""h = residual + dropout(x + bias) and the layer norm of h, against the formula in float64."""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.backends import Backend
from kernels.cases import BF16, DTYPES, FP16, FP32, KINDS, PAIR, WIDE, WIDTHS, each, normal, on, rows_of, same_bits
from kernels.loop import loop_over
from kernels.options import Dropout
from kernels.test_layer_norm import EPS, MODEL_WIDTHS, affine, check_normed, check_stats, gradients, stats, terms_of
from kernels.tolerances import ARITHMETIC, check

TOLERANCE = ARITHMETIC["residual_norm"]
DROP = Dropout(0.3, (2**32 + 5, 0, 7 * 2**32 + 1, 2**31), first_position=2**20 + 3)


def some_ids(dropout: Dropout | None, batch: int) -> Dropout | None:
    return None if dropout is None else replace(dropout, sample_ids=(dropout.sample_ids * batch)[:batch])


def kept(dropout: Dropout | None, shape: torch.Size) -> Tensor | float:
    """What dropout multiplies by."""
    return 1.0 if dropout is None else dropout.keep(shape).double() * dropout.scale


def check_forward(backend: Backend, x: Tensor, bias, residual: Tensor, weight, beta, dropout) -> tuple[Tensor, ...]:
    y, h, mean, rstd = backend.residual_norm_forward(x, bias, residual, weight, beta, EPS, dropout)
    factor, shift = kept(dropout, x.shape), 0.0 if bias is None else bias.double()
    branch = (x.double() + shift) * factor
    terms = residual.double().abs() + branch.abs() + (x.double().abs() + abs(shift)) * factor
    check("h", h, residual.double() + branch, terms, TOLERANCE)
    # h as it was rounded is what is normed.
    flat = h.flatten(0, 1)
    check_stats(mean, rstd, flat, EPS)
    check_normed(y.flatten(0, 1), flat, weight, beta, EPS)
    return y, h, mean, rstd


def check_backward(backend: Backend, h: Tensor, weight: Tensor, dropout, with_dh: bool, want: bool) -> None:
    dy, dh = normal(h.shape, h.dtype, "dy"), normal(h.shape, h.dtype, "dh") if with_dh else None
    flat, flat_dy = h.flatten(0, 1), dy.flatten(0, 1)
    actual = backend.residual_norm_backward(dy, dh, h, weight, *stats(flat, EPS), dropout, want, want)
    dx, dresidual, dbias, dweight, dbeta = actual
    expected, expected_dweight, expected_dbeta = gradients(flat_dy, flat, weight, EPS)
    terms, dweight_terms, dbeta_terms = terms_of(flat_dy, flat, weight, EPS)
    added = torch.zeros(()).double() if dh is None else dh.flatten(0, 1).double()
    expected, terms = (expected + added).view(h.shape), (terms + added.abs()).view(h.shape)
    check("dresidual", dresidual, expected, terms, TOLERANCE)
    factor = kept(dropout, h.shape)
    expected, terms = expected * factor, terms * factor
    if dx is not None:
        check("dx", dx, expected, terms, TOLERANCE)
        assert (dx[factor == 0] == 0).all()
    check("dweight", dweight, expected_dweight, dweight_terms, TOLERANCE)
    if want:
        check("dbias", dbias, expected.sum((0, 1)), terms.sum((0, 1)), TOLERANCE)
        check("dbeta", dbeta, expected_dbeta, dbeta_terms, TOLERANCE)


def check_both(backend: Backend, size, dtype, weight_dtype, dropout, rest: bool = True) -> None:
    """`rest`: with all that may be NULL."""
    dropout = some_ids(dropout, size[0])
    x, residual, (weight, beta) = normal(size, dtype, "x"), normal(size, dtype, "r"), affine(size[2], weight_dtype)
    bias = normal(size[2:], weight_dtype, "b") if rest else None
    _, h, _, _ = check_forward(backend, x, bias, residual, weight, beta if rest else None, dropout)
    check_backward(backend, h, weight, dropout, with_dh=rest, want=rest)


# [batch, positions, width].
SIZES = [
    *((2, 2, width) for width in WIDTHS),
    *((1, 2, width) for width in WIDE),
    (1, 1, 33),
    (3, 100, 40),
    (2, 1000, 5),
]
CORE_SIZES = [(1, 1, 1), (2, 2, 33), (1, 2, 768), (3, 20, 17), (2, 1, 777), (1, 1, 8193)]


@each(
    "size,dtype,dropout",
    [(s, d, p) for s in SIZES for d in DTYPES for p in (None, DROP)],
    [(s, DTYPES[i % 3], (DROP, None)[i % 2]) for i, s in enumerate((*CORE_SIZES, *CORE_SIZES[1:4]))],
)
def test_sizes(backend: Backend, size, dtype, dropout) -> None:
    check_both(backend, size, dtype, dtype, dropout)


@each(
    "width,dtype,dropout",
    [(w, d, p) for w in MODEL_WIDTHS for d in DTYPES for p in (None, DROP) if d is BF16 or w in (768, 2048)],
    [(w, BF16, None) for w in (768, 1024, 1280, 2048)] + [(768, FP16, DROP), (768, FP32, None)],
    backends=PAIR,
)
@loop_over("rest", [True, False])
def test_more_rows_than_a_gpu_holds_at_once(backend: Backend, width, dtype, dropout, rest) -> None:
    check_both(backend, (2, 35 if width < 1030 else 7, width), dtype, FP32, dropout, rest)


@each(
    "dtype,weight_dtype,dropout",
    [(d, w, p) for d in DTYPES for w in DTYPES for p in (None, DROP)],
    [(BF16, FP32, DROP), (FP16, FP32, None)],
)
@loop_over("width", [3, 96, 1300])
def test_parameters_of_another_dtype_and_null_arguments(backend: Backend, dtype, weight_dtype, dropout, width) -> None:
    check_both(backend, (2, 3, width), dtype, weight_dtype, dropout)
    check_both(backend, (2, 3, width), dtype, weight_dtype, dropout, rest=False)


@each("kind,dtype", [(k, d) for k in KINDS for d in DTYPES], [("big_mean", BF16), ("constant", FP32)])
def test_values_of_all_kinds(backend: Backend, kind, dtype) -> None:
    x, residual = (rows_of(kind, 6, width, dtype).view(2, 3, 300) for width in (300, 300))
    weight, beta = affine(300, FP32)
    dropout = some_ids(DROP, 2)
    _, h, _, _ = check_forward(backend, x, normal([300], FP32, "b"), residual, weight, beta, dropout)
    check_backward(backend, h, weight, dropout, with_dh=True, want=True)


@on()
def test_what_is_dropped_may_be_anything(backend: Backend) -> None:
    dropout, size = some_ids(DROP, 2), (2, 3, 50)
    keep = dropout.keep(size)
    x, residual, (weight, beta) = normal(size, FP32, "x"), normal(size, FP32, "r"), affine(50, FP32)
    args = None, residual, weight, beta, EPS, dropout
    expected = backend.residual_norm_forward(x, *args)
    for value in (float("nan"), float("inf")):
        actual = backend.residual_norm_forward(x.masked_fill(~keep, value), *args)
        assert all(same_bits(a, b) for a, b in zip(actual, expected, strict=True))


@on()
def test_empty_tensors(backend: Backend) -> None:
    for size in [(0, 3, 7), (2, 0, 7), (2, 3, 0)]:
        x, weight, dropout = torch.empty(size), torch.ones(size[2]), some_ids(DROP, size[0])
        rows = size[0] * size[1]
        assert backend.residual_norm_forward(x, weight, x, weight, weight, EPS, dropout)[0].shape == x.shape
        mean = torch.zeros(rows)
        sums = backend.residual_norm_backward(x, x, x, weight, mean, mean, dropout)[2:]
        assert all((each == 0).all() for each in sums)
