"""Softmax of attention scores with a causal or any other mask. A fully masked row gives zeros."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def causal_softmax(scores: Tensor, scale: float, fused: bool = False) -> Tensor:
    """Return softmax(scale * scores) over the keys that a query may attend to; scores [..., Sq, Sk].

    The queries are the last Sq positions: query i attends to keys 0 to i + Sk - Sq. Other entries are zero.
    """
    if fused:
        return _Softmax.apply(scores, None, scale, True)
    return masked_softmax(scores, future(scores.shape[-2], scores.shape[-1], scores.device), scale)


def masked_softmax(scores: Tensor, mask: Tensor | None, scale: float, fused: bool = False) -> Tensor:
    """Return softmax(scale * scores + mask) over the last dim of scores [B, H, Sq, Sk].

    `mask` is broadcast to the scores. A bool mask hides entries where it is True; a float mask is added.
    """
    if fused:
        return _Softmax.apply(scores, mask, scale, False)
    # In fp32 for 16-bit scores, in fp64 for fp64 scores.
    x = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if mask is not None:
        x = x.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else x + mask
    # A row with only -inf would give 0 / 0, in the gradient too.
    empty = (x == -torch.inf).all(-1, keepdim=True)
    return x.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0).to(scores.dtype)


def future(queries: int, keys: int, device: torch.device, window: int = 0) -> Tensor:
    """Return a bool mask [Sq, Sk], True where the key comes after the query, or is one of the `window` before that."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu_(keys - queries + 1 - window)


class _Softmax(torch.autograd.Function):
    """Autograd function of the fused softmax kernels. No gradient is computed for the mask."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
        ops = torch.ops.gptlite
        y = ops.causal_softmax(scores, scale) if causal else ops.masked_softmax(scores, mask, scale)
        ctx.save_for_backward(y)
        ctx.scale, ctx.causal = scale, causal
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        ops = torch.ops.gptlite
        backward = ops.causal_softmax_backward if ctx.causal else ops.masked_softmax_backward
        return backward(dy, *ctx.saved_tensors, ctx.scale), None, None, None
