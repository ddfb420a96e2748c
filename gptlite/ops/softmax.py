"""Softmax of attention scores, with the causal mask or any other. A row that is all masked is zeros."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def causal_softmax(scores: Tensor, scale: float, fused: bool = False) -> Tensor:
    """softmax(scale * scores) over the keys that a query sees; scores [..., Sq, Sk].

    The queries are the last Sq positions: query i sees keys 0 .. i + Sk - Sq. The rest is zeros.
    """
    if fused:
        return _CausalSoftmax.apply(scores, scale)
    queries, keys = scores.shape[-2:]
    future = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu_(keys - queries + 1)
    return masked_softmax(scores, future, scale)


def masked_softmax(scores: Tensor, mask: Tensor | None, scale: float, fused: bool = False) -> Tensor:
    """softmax(scale * scores + mask) over the last dim of scores [B, H, Sq, Sk].

    mask broadcasts to them: bool, True hides, or of a float dtype, which is added.
    """
    if fused:
        return _MaskedSoftmax.apply(scores, mask, scale)
    x = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if mask is not None:
        x = x.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else x + mask
    # A row of -inf alone would be 0 / 0, in the gradient too.
    empty = (x == -torch.inf).all(-1, keepdim=True)
    return x.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0).to(scores.dtype)


class _CausalSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float) -> Tensor:
        y = torch.ops.gptlite.causal_softmax(scores, scale)
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        return torch.ops.gptlite.causal_softmax_backward(dy, *ctx.saved_tensors, ctx.scale), None


class _MaskedSoftmax(torch.autograd.Function):
    """The mask gets no gradient: it is a mask."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        y = torch.ops.gptlite.masked_softmax(scores, mask, scale)
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        return torch.ops.gptlite.masked_softmax_backward(dy, *ctx.saved_tensors, ctx.scale), None, None
