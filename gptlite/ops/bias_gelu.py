"""Bias and GELU: the elementwise part of the MLP, between its two products."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str, fused: bool = False) -> Tensor:
    """Return gelu(x + bias), arXiv:1606.08415. x [..., F]; bias [F]; `approximate` is "tanh" (GPT-2) or "none" (exact).

    The fused kernel saves only x for the backward pass, not the sum, and does not round the sum.
    """
    if fused:
        return _BiasGelu.apply(x, bias, approximate == "tanh")
    return F.gelu(x if bias is None else x + bias, approximate=approximate)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.tanh = tanh
        return torch.ops.gptlite.bias_gelu(x, bias, tanh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        x, bias = ctx.saved_tensors
        dx, dbias = torch.ops.gptlite.bias_gelu_backward(dy, x, bias, ctx.tanh)
        return dx, None if bias is None else dbias, None
