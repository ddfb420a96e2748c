"""Activations of x + bias against the formulas in float64, and their gradients against autograd's."""

import math
import re

import torch
from torch import Tensor

from gptlite.kernels.activation import ACTIVATIONS, is_gated
from kernels.backends import Backend, units_of
from kernels.cases import BF16, DTYPES, FP16, FP32, WIDE, WIDTHS, each, normal, of_dtypes, on
from kernels.library import HEADER
from kernels.loop import loop_over
from kernels.tolerances import ARITHMETIC, check

TOLERANCE = ARITHMETIC["bias_activation"]
KINDS = tuple(ACTIVATIONS)
GATED = ("swiglu", "geglu")


def function(v: Tensor, kind: str) -> Tensor:
    """Of the gate, where there is one."""
    match kind:
        case "gelu_tanh":
            return 0.5 * v * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
        case "gelu_erf" | "geglu":
            return 0.5 * v * (1 + torch.erf(v / math.sqrt(2)))
        case "relu":
            return torch.relu(v)  # whose slope at 0 is 0
        case "relu2":
            return torch.relu(v) ** 2
        case "swiglu":
            return v / (1 + torch.exp(-v))
    raise ValueError(kind)


def activation(v: Tensor, kind: str) -> Tensor:
    return function(v[:, ::2], kind) * v[:, 1::2] if kind in GATED else function(v, kind)


def largest(size: Tensor, kind: str) -> Tensor:
    """How large the numbers are that make up a result, of what x and bias have added up in size."""
    if kind in GATED:
        return size[:, ::2] * size[:, 1::2]
    return size**2 if kind == "relu2" else size


def check_both(backend: Backend, x: Tensor, bias: Tensor | None, kind: str) -> None:
    shift = torch.zeros(()).double() if bias is None else bias.double()
    v, size = (x.double() + shift).requires_grad_(), x.double().abs() + shift.abs()
    expected = activation(v, kind)
    check("y", backend.bias_activation_forward(x, bias, kind), expected.detach(), largest(size, kind), TOLERANCE)
    dy = normal(expected.shape, x.dtype, "dy")
    dx, dbias = backend.bias_activation_backward(dy, x, bias, kind)
    (gradient,) = torch.autograd.grad(expected, v, dy.double())
    terms = terms_of(dy.double().abs(), size, kind)
    check("dx", dx, gradient, terms, TOLERANCE)
    assert (dbias is None) == (bias is None)
    if dbias is not None:
        check("dbias", dbias, gradient.sum(0), terms.sum(0), TOLERANCE)


def terms_of(dy: Tensor, size: Tensor, kind: str) -> Tensor:
    """The rounding of v is seen by the slope of the derivative, which is under 1, of relu2 under 2."""
    if kind not in GATED:
        return dy * (2 + (2 * size if kind == "relu2" else size.clamp(max=10)))
    gate, value = size[:, ::2], size[:, 1::2]
    return torch.stack([dy * value * (2 + gate.clamp(max=10)), dy * (gate + 1)], dim=-1).flatten(1)


def test_the_numbers_are_the_headers() -> None:
    found = dict(re.findall(r"GPTLITE_((?:GELU|RELU|SWI|GE)\w*) = (\d)", HEADER.read_text()))
    assert {name.lower(): int(number) for name, number in found.items()} == ACTIVATIONS
    assert tuple(kind for kind, number in ACTIVATIONS.items() if is_gated(number)) == GATED


SIZES = [*((3, width) for width in WIDTHS), *((2, width) for width in WIDE), (1, 33), (7, 1), (600, 40), (2500, 5)]
CORE_SIZES = [(1, 1), (3, 33), (2, 768), (70, 17), (1, 777), (1, 8193)]
KINDS_OF_ALL_SIZES = ("gelu_tanh", "gelu_erf", "relu2", "swiglu")  # the others differ by their function alone


@each(
    "size,dtype,kind",
    [(s, d, k) for s in SIZES for d in DTYPES for k in KINDS_OF_ALL_SIZES],
    [(s, DTYPES[(i + k) % 3], kind) for i, s in enumerate(CORE_SIZES) for k, kind in enumerate(KINDS)],
)
def test_sizes(backend: Backend, size, dtype, kind) -> None:
    rows, units = size
    x = normal((rows, units * (2 if kind in GATED else 1)), dtype, "x") * 2
    check_both(backend, x, normal(x.shape[1:], dtype, "bias"), kind)
    check_both(backend, x, None, kind)


@on()
@loop_over("kind", KINDS)
@of_dtypes()
def test_all_arguments(backend: Backend, dtype, kind) -> None:
    """Where tanh, erf and exp turn, saturate and underflow."""
    most = 11 if backend.is_cpu else 6
    most = 80 if kind == "swiglu" and backend.is_cpu else most
    x = torch.linspace(-most, most, 2001 if backend.is_emulated else 40_001).to(dtype)
    small = torch.logspace(-30, 0, 500).to(dtype)
    x = torch.cat([x, small, -small])
    x = torch.stack([x, normal(x.shape, dtype, "value")], dim=-1).flatten() if kind in GATED else x
    check_both(backend, x.view(1, -1), None, kind)


@on()
@loop_over("kind", KINDS)
@of_dtypes()
def test_large_arguments(backend: Backend, dtype, kind) -> None:
    """Whose cube is infinite in fp32: the function is v or 0 there, and its derivative 1 or 0; of relu2 2 v."""
    sizes = [20.0, 100.0, 6e4] if dtype == FP16 else [20.0, 100.0, 1e5, 1e13, 1e18, 1e25, 3e38]
    sizes = sizes[1:] if kind == "swiglu" else sizes
    x = torch.tensor([[*sizes, *(-size for size in sizes)]]).to(dtype)
    given = torch.stack([x, torch.full_like(x, 0.5)], dim=-1).flatten(1) if kind in GATED else x
    above = x.clamp(min=0)
    y = backend.bias_activation_forward(given, None, kind)
    exact = {"relu2": above.float() ** 2, "swiglu": 0.5 * above, "geglu": 0.5 * above}
    assert torch.equal(y, exact.get(kind, above).to(dtype))
    dx, _ = backend.bias_activation_backward(torch.full_like(x, 2), given, None, kind)
    slope = 2 * above.float() if kind == "relu2" else (x > 0).float()
    if kind in GATED:
        assert torch.equal(dx[:, 1::2], (2 * above.float()).to(dtype))
        dx, slope = dx[:, ::2], 0.5 * slope
    assert torch.equal(dx, (2 * slope).to(dtype))


@on()
@loop_over("kind", KINDS)
def test_nan_reaches_its_unit_alone(backend: Backend, kind) -> None:
    x = normal((2, 40), FP32, "x")
    x[0, 3] = x[1, 39] = x[1, 16] = float("nan")
    bias, ones = torch.zeros(40), torch.ones(units_of(x, kind))
    off = x.isnan()
    units = off.unflatten(1, (-1, 2)).any(2) if kind in GATED else off
    assert torch.equal(backend.bias_activation_forward(x, bias, kind).isnan(), units)
    dx, dbias = backend.bias_activation_backward(ones, x, bias, kind)
    if kind in GATED:  # dy times f(gate) does not have the value
        units = torch.stack([units, off[:, ::2]], dim=-1).flatten(1)
    assert torch.equal(dx.isnan(), units)
    assert torch.equal(dbias.isnan(), units.any(0))


@on()
@of_dtypes((BF16, FP16))
def test_the_sum_is_not_rounded_before_the_function(backend: Backend, dtype) -> None:
    x, bias = torch.full((2, 40), 8.0, dtype=dtype), torch.full((40,), -8.0 + 2.0**-6, dtype=dtype)
    near = torch.full((2, 40), 1.0, dtype=dtype), torch.full((40,), 2.0**-12, dtype=dtype)
    for kind in ("gelu_tanh", "swiglu"):
        for pair in ((x, bias), near):
            check_both(backend, *pair, kind)


@on()
def test_empty_tensors(backend: Backend) -> None:
    for kind in ("gelu_tanh", "swiglu"):
        for size in [(0, 8), (3, 0), (0, 0)]:
            x, bias = torch.empty(size), torch.ones(size[1])
            y = backend.bias_activation_forward(x, bias, kind)
            assert y.shape == units_of(x, kind)
            dx, dbias = backend.bias_activation_backward(y, x, bias, kind)
            assert dx.shape == x.shape
            assert (dbias == 0).all()
