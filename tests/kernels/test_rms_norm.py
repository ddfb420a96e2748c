"""RMS norm, alone and of h = residual + dropout(x + bias), against the formula in float64."""

import torch
from torch import Tensor

from kernels.backends import Backend
from kernels.cases import BF16, CPUS, DTYPES, FP16, FP32, KINDS, PAIR, WIDE, WIDTHS, each, normal, on, rows_of
from kernels.loop import loop_over
from kernels.options import Dropout
from kernels.test_layer_norm import EPS, MODEL_WIDTHS
from kernels.test_residual_norm import DROP, kept, some_ids
from kernels.tolerances import ARITHMETIC, check

TOLERANCE = ARITHMETIC["layer_norm"]


def rstd_of(x: Tensor, eps: float = EPS) -> Tensor:
    return (x.double().square().mean(-1) + eps) ** -0.5


def gain(weight: Tensor | None, x: Tensor) -> Tensor:
    return torch.ones(x.shape[-1]).double() if weight is None else weight.double()


def check_normed(y: Tensor, rstd: Tensor, x: Tensor, weight: Tensor | None, eps: float = EPS) -> None:
    expected = rstd_of(x, eps)
    check("rstd", rstd, expected, expected, TOLERANCE)
    normed = x.double() * expected.unsqueeze(-1) * gain(weight, x)
    check("y", y, normed, normed.abs(), TOLERANCE)


def gradients(dy: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """dx and dweight in float64, by autograd."""
    leaf, weight = x.double().requires_grad_(), gain(weight, x).requires_grad_()
    y = leaf * (leaf.square().mean(-1, keepdim=True) + EPS) ** -0.5 * weight
    return torch.autograd.grad(y, (leaf, weight), dy.double())


def terms_of(dy: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """What dx and dweight are sums of."""
    rstd, dy = rstd_of(x).unsqueeze(-1), dy.double()
    normed, g = (x.double() * rstd).abs(), (dy * gain(weight, x)).abs()
    return rstd * (g + normed * (g * normed).mean(-1, keepdim=True)), (dy.abs() * normed).sum(0)


def check_alone(backend: Backend, x: Tensor, weight: Tensor | None) -> None:
    y, mean, rstd = backend.layer_norm_forward(x, weight, None, EPS, rms=True)
    assert mean is None
    check_normed(y, rstd, x, weight)
    dy = normal(x.shape, x.dtype, "dy")
    dx, dweight, dbias = backend.layer_norm_backward(dy, x, weight, None, rstd_of(x).float(), want_bias=False)
    (expected, dweight_expected), (terms, dweight_terms) = gradients(dy, x, weight), terms_of(dy, x, weight)
    check("dx", dx, expected, terms, TOLERANCE)
    assert dbias is None
    assert (dweight is None) == (weight is None)
    if dweight is not None:
        check("dweight", dweight, dweight_expected, dweight_terms, TOLERANCE)


def check_residual(
    backend: Backend,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dropout: Dropout | None,
    with_dh: bool = True,
) -> None:
    dropout = some_ids(dropout, x.shape[0])
    y, h, _, rstd = backend.residual_norm_forward(x, bias, residual, weight, None, EPS, dropout, rms=True)
    factor, shift = kept(dropout, x.shape), torch.zeros(()) if bias is None else bias.double()
    branch = (x.double() + shift) * factor
    terms = residual.double().abs() + branch.abs() + (x.double().abs() + shift.abs()) * factor
    check("h", h, residual.double() + branch, terms, TOLERANCE)
    flat = h.flatten(0, 1)  # h as it was rounded is what is normed
    check_normed(y.flatten(0, 1), rstd, flat, weight)

    dy, dh = normal(h.shape, h.dtype, "dy"), normal(h.shape, h.dtype, "dh") if with_dh else None
    has_bias = bias is not None
    dx, dresidual, dbias, dweight, dbeta = backend.residual_norm_backward(
        dy, dh, h, weight, None, rstd_of(flat).float(), dropout, want_bias=has_bias, want_beta=False
    )
    added = torch.zeros(()).double() if dh is None else dh.double()
    (expected, dweight_expected), (terms, dweight_terms) = (
        made(dy.flatten(0, 1), flat, weight) for made in (gradients, terms_of)
    )
    expected, terms = expected.view(h.shape) + added, terms.view(h.shape) + added.abs()
    check("dresidual", dresidual, expected, terms, TOLERANCE)
    if dx is not None:
        check("dx", dx, expected * factor, terms * factor, TOLERANCE)
    if dbias is not None:
        check("dbias", dbias, (expected * factor).sum((0, 1)), (terms * factor).sum((0, 1)), TOLERANCE)
    if dweight is not None:
        check("dweight", dweight, dweight_expected, dweight_terms, TOLERANCE)
    assert ((dbias is None), (dweight is None), dbeta) == (bias is None, weight is None, None)


def gain_of(width: int, dtype: torch.dtype) -> Tensor:
    return normal([width], dtype, "weight") + 1


SIZES = [*((5, width) for width in WIDTHS), *((2, width) for width in WIDE), (1, 768), (7, 33), (300, 40), (2500, 5)]
CORE_SIZES = [(1, 1), (3, 33), (70, 17), (2, 777), (1, 4096), (1, 8193)]


@each("size,dtype", [(s, d) for s in SIZES for d in DTYPES], [(s, DTYPES[i % 3]) for i, s in enumerate(CORE_SIZES)])
def test_sizes(backend: Backend, size, dtype) -> None:
    check_alone(backend, normal(size, dtype, "x"), gain_of(size[1], dtype))


@each(
    "size,dtype,dropout",
    [((2, 2, w), d, p) for w in (*WIDTHS, *WIDE) for d in DTYPES for p in (None, DROP)],
    [((1, 1, 1), FP32, DROP), ((2, 2, 33), FP16, None), ((3, 20, 17), FP32, None), ((1, 1, 8193), BF16, DROP)],
)
def test_sizes_after_a_residual_sum(backend: Backend, size, dtype, dropout) -> None:
    x, residual, bias = normal(size, dtype, "x"), normal(size, dtype, "r"), normal(size[2:], dtype, "b")
    check_residual(backend, x, residual, gain_of(size[2], dtype), bias, dropout)


@each(
    "width,dtype,dropout",
    [(w, d, p) for w in MODEL_WIDTHS for d in DTYPES for p in (None, DROP) if d is BF16 or w in (768, 2048)],
    [(w, BF16, None) for w in (768, 1024, 2048)] + [(768, FP16, DROP), (768, FP32, None)],
    backends=PAIR,  # to other CPUs these widths are like any other
)
def test_more_rows_than_a_gpu_holds_at_once(backend: Backend, width, dtype, dropout) -> None:
    size, weight = (2, 35 if width < 1030 else 7, width), gain_of(width, FP32)
    x, residual = normal(size, dtype, "x"), normal(size, dtype, "r")
    check_alone(backend, x.flatten(0, 1), weight)
    check_residual(backend, x, residual, weight, normal([width], FP32, "b"), dropout)
    check_residual(backend, x, residual, weight, None, dropout)


@each(
    "dtype,weight_dtype,dropout",
    [(d, w, p) for d in DTYPES for w in DTYPES for p in (None, DROP)],
    [(BF16, FP32, DROP), (FP16, FP32, None)],
)
@loop_over("width", [3, 96, 1300])
def test_parameters_of_another_dtype_or_none(backend: Backend, dtype, weight_dtype, dropout, width) -> None:
    size = 2, 3, width
    x, residual, weight = normal(size, dtype, "x"), normal(size, dtype, "r"), gain_of(width, weight_dtype)
    for each_weight in (weight, None):
        check_alone(backend, x.flatten(0, 1), each_weight)
        check_residual(backend, x, residual, each_weight, None, dropout, with_dh=False)
    check_residual(backend, x, residual, weight, normal([width], weight_dtype, "b"), dropout)
    check_residual(backend, x, residual, None, normal([width], dtype, "b"), dropout)


@each("kind,dtype", [(k, d) for k in KINDS for d in DTYPES], [("big_mean", FP32), ("constant", BF16), ("zeros", FP16)])
@loop_over("width", [33, 5000])
def test_values_of_all_kinds(backend: Backend, kind, dtype, width) -> None:
    x = rows_of(kind, 4, width, dtype)
    check_alone(backend, x, gain_of(width, FP32))
    check_residual(backend, x.view(2, 2, width), x.view(2, 2, width), gain_of(width, FP32), None, None)


@each("dtype", (FP32, BF16), backends=CPUS)
def test_rows_whose_squares_overflow(backend: Backend, dtype) -> None:
    x = (normal((3, 70), FP32, "x") * 1e25).to(dtype)
    y, _, rstd = backend.layer_norm_forward(x, None, None, EPS, rms=True)
    check_normed(y, rstd, x, None)
    y, h, _, rstd = backend.residual_norm_forward(x[None], None, x[None], None, None, EPS, None, rms=True)
    check_normed(y[0], rstd, h[0], None)


@on()
@loop_over("width", [1, 50, 3000])
def test_nan_and_infinity_reach_their_row_alone(backend: Backend, width) -> None:
    x, weight = normal((4, width), FP32, "x"), gain_of(width, FP32)
    x[1, width // 2], x[2, width - 1] = float("nan"), float("inf")
    y, _, rstd = backend.layer_norm_forward(x, weight, None, EPS, rms=True)
    assert y[1].isnan().all()
    assert y[2, width - 1].isnan()  # inf / inf
    check_normed(y[0::3], rstd[0::3], x[0::3], weight)


@on()
def test_empty_tensors(backend: Backend) -> None:
    for size in [(0, 2, 7), (3, 0, 7), (3, 2, 0)]:
        x, weight = torch.empty(size), torch.ones(size[2])
        flat, rstd = x.flatten(0, 1), torch.zeros(size[0] * size[1])
        assert backend.layer_norm_forward(flat, weight, None, EPS, rms=True)[0].shape == flat.shape
        assert backend.residual_norm_forward(x, weight, x, weight, None, EPS, None, rms=True)[0].shape == x.shape
        dx, dweight, _ = backend.layer_norm_backward(flat, flat, weight, None, rstd, want_bias=False)
        assert dx.shape == flat.shape
        assert (dweight == 0).all()  # the sum over no rows
        _, _, dbias, dweight, _ = backend.residual_norm_backward(x, x, x, weight, None, rstd, None, want_beta=False)
        assert (dbias == 0).all()
        assert (dweight == 0).all()
