"""Clipping against torch's, and the norm against float64."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gptlite.optimizer.clip import CPU_PIECE, clip_gradients, local_grad_norm

SHAPES = [(300, 500), (500,), (), (CPU_PIECE + 1,)]


def with_gradients(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = (scale * torch.randn(parameter.shape, generator=generator)).to(dtype)
    return [*parameters, nn.Parameter(torch.zeros(3))]  # the last has no gradient


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clips the gradients of one device by their norm, which is returned as before."""
    parameters = list(parameters)
    norm = local_grad_norm(parameters)
    clip_gradients(parameters, max_norm, norm)
    return norm


def gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]


def exact_norm(tensors: list[Tensor]) -> float:
    return torch.cat([tensor.flatten().double() for tensor in tensors]).norm().item()


@pytest.mark.parametrize("max_norm", [1.0, 1e6], ids=["clipped", "within"])
def test_same_as_torch(max_norm):
    ours, theirs = with_gradients(), with_gradients()
    norm = clip_grad_norm(ours, max_norm)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, max_norm))
    torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=1e-6, atol=0)


def test_clips_to_max_norm_and_keeps_the_direction():
    parameters = with_gradients()
    before = gradients(parameters)
    clip_grad_norm(iter(parameters), 0.5)  # any iterable will do
    assert exact_norm(gradients(parameters)) == pytest.approx(0.5, rel=1e-5)
    for old, new in zip(before, gradients(parameters), strict=True):
        torch.testing.assert_close(new / 0.5, old / exact_norm(before), rtol=1e-5, atol=1e-9)


def test_max_norm_0_only_measures():
    parameters = with_gradients()
    before = gradients(parameters)
    assert clip_grad_norm(parameters, 0.0).item() == pytest.approx(exact_norm(before), rel=1e-6)
    assert all(torch.equal(old, new) for old, new in zip(before, gradients(parameters), strict=True))


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float16, 1000.0)])
def test_norm_is_0_dim_fp32_whatever_the_gradients_are(dtype, scale):
    """At a scale of 1000 the norm of the fp16 gradients is above 65504, the largest fp16 number."""
    parameters = with_gradients(dtype, scale)
    norm = local_grad_norm(parameters)
    assert (norm.shape, norm.dtype) == ((), torch.float32)
    assert norm.item() == pytest.approx(exact_norm(gradients(parameters)), rel=1e-5)


def test_a_large_gradient_is_measured_exactly():
    """16M elements: a single fp32 CPU reduction is off by 8e-4 here, more than clipping may differ by layout."""
    parameter = nn.Parameter(torch.empty(2**24))
    parameter.grad = torch.randn(2**24, generator=torch.Generator().manual_seed(0)).add_(0.5)
    assert local_grad_norm([parameter]).item() == pytest.approx(exact_norm([parameter.grad]), rel=1e-6)


def test_no_gradients_have_norm_0():
    assert clip_grad_norm([nn.Parameter(torch.zeros(3))], 1.0).item() == 0


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(poison):
    parameters = with_gradients()
    assert parameters[0].grad is not None
    parameters[0].grad[7, 7] = poison
    assert not clip_grad_norm(parameters, 1.0).isfinite()


def test_nothing_waits_for_the_device():
    """Fake tensors have no values: reading one, as a host sync would, raises."""
    with FakeTensorMode():
        clip_grad_norm(with_gradients(), 1.0)
