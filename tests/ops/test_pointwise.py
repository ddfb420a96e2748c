"""Layer norm and bias-GELU against their definitions in fp64."""

import math

import pytest
import torch

from gptlite.ops.bias_gelu import bias_gelu
from gptlite.ops.layer_norm import layer_norm

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # largest error over the largest value


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


def run(op, tensors, dtype):
    leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
    out = op(*leaves)
    return [out.detach(), *torch.autograd.grad((out * torch.linspace(-1, 2, out.shape[-1]).to(dtype)).sum(), leaves)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 33), (4, 1, 256)])
def test_layer_norm(shape, with_bias, dtype):
    generator = torch.Generator().manual_seed(0)
    x = (3 + 2 * torch.randn(shape, generator=generator)).to(dtype)
    weight, bias = (torch.randn(shape[-1], generator=generator).to(dtype) for _ in range(2))
    tensors = [x, weight, bias][: 3 if with_bias else 2]

    def defined(x, weight, bias=0.0):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias

    got = run(lambda x, weight, bias=None: layer_norm(x, weight, bias, 1e-5), tensors, dtype)
    for a, b in zip(got, run(defined, tensors, torch.float64), strict=True):
        assert error(a, b) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_bias_gelu(approximate, with_bias, dtype):
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(4, 7, 33, generator=generator)).to(dtype)
    tensors = [x, torch.randn(33, generator=generator).to(dtype)][: 2 if with_bias else 1]

    def defined(x, bias=0.0):
        x = x + bias
        if approximate == "none":
            return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    got = run(lambda x, bias=None: bias_gelu(x, bias, approximate), tensors, dtype)
    for a, b in zip(got, run(defined, tensors, torch.float64), strict=True):
        assert error(a, b) < TOLERANCE[dtype]
