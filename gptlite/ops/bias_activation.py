"""Bias and activation: the elementwise part of the MLP, between its two GEMMs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptlite.kernels.activation import ACTIVATIONS, is_gated
from gptlite.ops.weight_copies import noted, noting

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # arXiv:1606.08415, GPT-2's approximation
    "gelu_erf": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),  # arXiv:2109.08668
    "swiglu": F.silu,  # arXiv:2002.05202, also for geglu
    "geglu": F.gelu,
}


def bias_activation(x: Tensor, bias: Tensor | None, kind: str, fused: bool = False, amax: bool = False) -> Tensor:
    """Return f(x + bias) [..., F], with the formula f of `kind`. x [..., F]; bias [F].

    For a gated kind, x is [..., 2F] and bias [2F]: columns 2i and 2i + 1 of x + bias are the gate and the value of unit
    i, and the result is f(gate) * value. The fused kernel saves only x and bias for the backward pass, and rounds only
    the result. With `amax`, it notes the amax of its results, including the gradient of x.
    """
    number = ACTIVATIONS[kind]
    if fused:
        return _BiasActivation.apply(x, bias, number, noting(amax))
    total = x if bias is None else x + bias
    if not is_gated(number):
        return FORMULAS[kind](total)
    gate, value = total.unflatten(-1, (-1, 2)).unbind(-1)
    return FORMULAS[kind](gate) * value


class _BiasActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, kind: int, amax: bool) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.kind, ctx.amax = kind, amax
        if amax:
            return noted(*torch.ops.gptlite.bias_activation_amax(x, bias, kind))
        return torch.ops.gptlite.bias_activation(x, bias, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        x, bias = ctx.saved_tensors
        ops, largest = torch.ops.gptlite, None
        if ctx.amax:
            dx, dbias, largest = ops.bias_activation_amax_backward(dy, x, bias, ctx.kind)
        else:
            dx, dbias = ops.bias_activation_backward(dy, x, bias, ctx.kind)
        return noted(dx, largest), None if bias is None else dbias, None, None
