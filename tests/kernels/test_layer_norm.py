"""Layer norm against the formula in float64, and its gradients against autograd's."""

import torch
from torch import Tensor

from kernels.backends import Backend
from kernels.cases import BF16, DTYPES, FP16, FP32, KINDS, PAIR, WIDE, WIDTHS, each, normal, of_dtypes, on, rows_of
from kernels.loop import loop_over
from kernels.tolerances import ARITHMETIC, check

EPS = 1e-5
TOLERANCE = ARITHMETIC["layer_norm"]


def check_stats(mean: Tensor, rstd: Tensor, x: Tensor, eps: float) -> None:
    """An error of the mean enters the variance by its square, so rstd lies between those of two variances."""
    x = x.double()
    largest = x.abs().amax(-1)
    check("mean", mean, x.mean(-1), largest, TOLERANCE)
    variance = x.var(-1, unbiased=False)
    slack = 2 * TOLERANCE * variance + (TOLERANCE * largest) ** 2
    low, high = (variance + slack + eps) ** -0.5, ((variance - slack).clamp(min=0) + eps) ** -0.5
    known = variance.isfinite()
    assert torch.equal(rstd.isfinite(), known)
    within = (rstd.double() >= low * (1 - TOLERANCE)) & (rstd.double() <= high * (1 + TOLERANCE))
    assert within[known].all(), "rstd"


def check_normed(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    x, weight = x.double(), weight.double()
    bias = torch.zeros(()) if bias is None else bias.double()
    centred, largest = x - x.mean(-1, keepdim=True), x.abs().amax(-1, keepdim=True)
    rstd = (x.var(-1, unbiased=False, keepdim=True) + eps) ** -0.5
    check("y", y, centred * rstd * weight + bias, (largest * rstd * weight).abs().nan_to_num() + bias.abs(), TOLERANCE)


def gradients(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias in float64."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    bias = torch.zeros_like(weight).requires_grad_()
    rstd = (x.var(-1, unbiased=False, keepdim=True) + eps) ** -0.5
    y = (x - x.mean(-1, keepdim=True)) * rstd * weight + bias
    return torch.autograd.grad(y, (x, weight, bias), dy.double())


def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """mean and rstd as the forward gives them."""
    x = x.double()
    return x.mean(-1).float(), ((x.var(-1, unbiased=False) + eps) ** -0.5).float()


def terms_of(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """What dx, dweight and dbias are sums of. A mean that is not near zero adds its rounding to the normed x."""
    x, dy, weight = x.double(), dy.double(), weight.double()
    rstd = (x.var(-1, unbiased=False, keepdim=True) + eps) ** -0.5
    mean = x.mean(-1, keepdim=True)
    normed = (x - mean).abs() * rstd + mean.abs() * rstd
    g = (dy * weight).abs()
    dx = rstd * (g + g.mean(-1, keepdim=True) + normed * (g * normed).mean(-1, keepdim=True))
    return dx, (dy.abs() * normed).sum(0), dy.abs().sum(0)


def check_gradients(actual: tuple, dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    terms = terms_of(dy, x, weight, eps)
    for name, a, e, t in zip(("dx", "dweight", "dbias"), actual, gradients(dy, x, weight, eps), terms, strict=True):
        if a is not None:
            check(name, a, e, t, TOLERANCE)


def affine(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return normal([width], dtype, "weight") + 1, normal([width], dtype, "bias")


def check_both(backend: Backend, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = EPS) -> None:
    y, mean, rstd = backend.layer_norm_forward(x, weight, bias, eps)
    check_stats(mean, rstd, x, eps)
    check_normed(y, x, weight, bias, eps)
    dy = normal(x.shape, x.dtype, "dy")
    actual = backend.layer_norm_backward(dy, x, weight, *stats(x, eps), want_bias=bias is not None)
    check_gradients(actual, dy, x, weight, eps)


SIZES = [*((5, width) for width in WIDTHS), *((2, width) for width in WIDE), (1, 768), (7, 33), (300, 40), (2500, 5)]
CORE_SIZES = [(1, 1), (3, 33), (2, 768), (70, 17), (2, 777), (1, 4096), (1, 8193)]


@each("size,dtype", [(s, d) for s in SIZES for d in DTYPES], [(s, DTYPES[i % 3]) for i, s in enumerate(CORE_SIZES)])
def test_sizes(backend: Backend, size, dtype) -> None:
    check_both(backend, normal(size, dtype, "x"), *affine(size[1], dtype))


# Widths of models: a GPU's rows are held by a part of a warp, a warp, or several, of 16, 24 or 32 elements a thread.
MODEL_WIDTHS = (512, 520, 768, 800, 1024, 1280, 1536, 2048, 2560, 4096, 6144, 8192)


@each(
    "width,dtype",
    [(w, d) for w in MODEL_WIDTHS for d in DTYPES],
    [(w, BF16) for w in MODEL_WIDTHS[1:9]],
    backends=PAIR,  # to other CPUs these widths are like any other
)
def test_more_rows_than_a_gpu_holds_at_once(backend: Backend, width, dtype) -> None:
    check_both(backend, normal((70 if width < 1030 else 13, width), dtype, "x"), *affine(width, FP32))


@each("dtype,weight_dtype", [(d, w) for d in DTYPES for w in DTYPES], [(BF16, FP32), (FP32, BF16), (FP16, FP32)])
@loop_over("width", [3, 96, 1300])
def test_parameters_of_another_dtype_and_no_bias(backend: Backend, dtype, weight_dtype, width) -> None:
    x, (weight, bias) = normal((9, width), dtype, "x"), affine(width, weight_dtype)
    check_both(backend, x, weight, bias)
    check_both(backend, x, weight, None)


@each(
    "kind,dtype", [(k, d) for k in KINDS for d in DTYPES], [("big_mean", FP32), ("constant", FP32), ("outlier", BF16)]
)
@loop_over("width", [33, 1024, 5000])
def test_values_of_all_kinds(backend: Backend, kind, dtype, width) -> None:
    check_both(backend, rows_of(kind, 4, width, dtype), *affine(width, dtype))


@each("eps", (1e-12, 1e-5, 0.1, 10.0), (0.1,))
def test_eps(backend: Backend, eps) -> None:
    check_both(backend, normal((3, 100), FP32, "x") * 0.1, *affine(100, FP32), eps)


@on()
@loop_over("width", [1, 50, 3000])
def test_nan_and_infinity_reach_their_row_alone(backend: Backend, width) -> None:
    x, (weight, bias) = normal((4, width), FP32, "x"), affine(width, FP32)
    x[1, width // 2], x[2, width - 1] = float("nan"), float("inf")
    y, mean, _ = backend.layer_norm_forward(x, weight, bias, EPS)
    assert y[1:3].isnan().all()
    assert mean[1].isnan()
    check_normed(y[0::3], x[0::3], weight, bias, EPS)


@on()
def test_empty_tensors(backend: Backend) -> None:
    for size in [(0, 7), (3, 0), (0, 0)]:
        x, weight = torch.empty(size), torch.ones(size[1])
        y, mean, _ = backend.layer_norm_forward(x, weight, weight, EPS)
        assert y.shape == x.shape
        mean = rstd = torch.zeros(size[0])
        dx, dweight, dbias = backend.layer_norm_backward(x, x, weight, mean, rstd)
        assert dx.shape == x.shape
        assert (dweight == 0).all()  # the sum over no rows
        assert (dbias == 0).all()


@on()
@of_dtypes()
def test_column_sums_of_many_rows(backend: Backend, dtype) -> None:
    """Partial sums in fp32: thousands of rows whose gradient has one sign."""
    rows = 300 if backend.is_emulated else 3000
    x, dy = normal((rows, 24), dtype, "x"), normal((rows, 24), dtype, "dy").abs()
    weight, _ = affine(24, FP32)
    check_gradients(backend.layer_norm_backward(dy, x, weight, *stats(x, EPS)), dy, x, weight, EPS)
