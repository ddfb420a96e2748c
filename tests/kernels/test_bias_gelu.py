"""gelu(x + bias) against the formulas in float64, and its gradients against autograd's."""

import math

import pytest
import torch
from torch import Tensor

from kernels.backends import Backend
from kernels.cases import BF16, DTYPES, FP16, FP32, WIDE, WIDTHS, each, normal, of_dtypes, on
from kernels.tolerances import ARITHMETIC, check

TOLERANCE = ARITHMETIC["bias_gelu"]


def gelu(v: Tensor, approximate: bool) -> Tensor:
    if approximate:
        return 0.5 * v * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
    return 0.5 * v * (1 + torch.erf(v / math.sqrt(2)))


def derivative(v: Tensor, approximate: bool) -> Tensor:
    v = v.detach().requires_grad_()
    return torch.autograd.grad(gelu(v, approximate).sum(), v)[0]


def check_both(backend: Backend, x: Tensor, bias: Tensor | None, approximate: bool) -> None:
    shift = torch.zeros(()).double() if bias is None else bias.double()
    v, size = x.double() + shift, x.double().abs() + shift.abs()
    y = backend.bias_gelu_forward(x, bias, approximate)
    check("y", y, gelu(v, approximate), size, TOLERANCE)
    dy = normal(x.shape, x.dtype, "dy")
    dx, dbias = backend.bias_gelu_backward(dy, x, bias, approximate)
    expected = dy.double() * derivative(v, approximate)
    # The rounding of v is seen by the slope of the derivative, which is under 1.
    terms = dy.double().abs() * (2 + size.clamp(max=10))
    check("dx", dx, expected, terms, TOLERANCE)
    assert (dbias is None) == (bias is None)
    if dbias is not None:
        check("dbias", dbias, expected.sum(0), terms.sum(0), TOLERANCE)


SIZES = [*((3, width) for width in WIDTHS), *((2, width) for width in WIDE), (1, 33), (7, 1), (600, 40), (2500, 5)]
CORE_SIZES = [(1, 1), (3, 33), (2, 768), (70, 17), (1, 777), (1, 8193)]


@each(
    "size,dtype,approximate",
    [(s, d, a) for s in SIZES for d in DTYPES for a in (True, False)],
    [(s, DTYPES[(i + a) % 3], a) for i, s in enumerate((*CORE_SIZES, *CORE_SIZES[1:4])) for a in (True, False)],
)
def test_sizes(backend: Backend, size, dtype, approximate) -> None:
    x = normal(size, dtype, "x") * 2
    check_both(backend, x, normal(size[1:], dtype, "bias"), approximate)
    check_both(backend, x, None, approximate)


@on()
@pytest.mark.parametrize("approximate", [True, False])
@of_dtypes()
def test_all_arguments(backend: Backend, dtype, approximate) -> None:
    """Where tanh and erf turn, saturate and underflow."""
    largest = 11 if backend.is_cpu else 6
    x = torch.linspace(-largest, largest, 2001 if backend.is_emulated else 40_001).to(dtype)
    small = torch.logspace(-30, 0, 500).to(dtype)
    check_both(backend, torch.cat([x, small, -small]).view(1, -1), None, approximate)


@on()
@pytest.mark.parametrize("approximate", [True, False])
@of_dtypes()
def test_large_arguments(backend: Backend, dtype, approximate) -> None:
    """Whose cube is infinite in fp32: the function is v or 0 there, and its derivative 1 or 0."""
    sizes = [20.0, 100.0, 6e4] if dtype == FP16 else [20.0, 100.0, 1e5, 1e13, 1e18, 1e25, 3e38]
    x = torch.tensor([[*sizes, *(-size for size in sizes)]]).to(dtype)
    y = backend.bias_gelu_forward(x, None, approximate)
    assert torch.equal(y, x.clamp(min=0))
    dx, _ = backend.bias_gelu_backward(torch.full_like(x, 2), x, None, approximate)
    assert torch.equal(dx, 2 * (x > 0).to(dtype))


@on()
@pytest.mark.parametrize("approximate", [True, False])
def test_nan_reaches_its_element_alone(backend: Backend, approximate) -> None:
    x = normal((2, 40), FP32, "x")
    x[0, 3] = x[1, 39] = float("nan")
    bias = torch.zeros(40)
    assert torch.equal(backend.bias_gelu_forward(x, bias, approximate).isnan(), x.isnan())
    dx, dbias = backend.bias_gelu_backward(torch.ones_like(x), x, bias, approximate)
    assert torch.equal(dx.isnan(), x.isnan())
    assert torch.equal(dbias.isnan(), x.isnan().any(0))


@on()
@of_dtypes((BF16, FP16))
def test_the_sum_is_not_rounded_before_the_gelu(backend: Backend, dtype) -> None:
    x, bias = torch.full((2, 40), 8.0, dtype=dtype), torch.full((40,), -8.0 + 2.0**-6, dtype=dtype)
    near = torch.full((2, 40), 1.0, dtype=dtype), torch.full((40,), 2.0**-12, dtype=dtype)
    for pair in ((x, bias), near):
        check_both(backend, *pair, approximate=True)


@on()
def test_empty_tensors(backend: Backend) -> None:
    for size in [(0, 7), (3, 0), (0, 0)]:
        x, bias = torch.empty(size), torch.ones(size[1])
        assert backend.bias_gelu_forward(x, bias, True).shape == x.shape
        dx, dbias = backend.bias_gelu_backward(x, x, bias, True)
        assert dx.shape == x.shape
        assert (dbias == 0).all()
