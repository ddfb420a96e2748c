"""Rotary position embeddings (RoPE, Su et al. 2021, arXiv:2104.09864), optionally after an RMS norm of queries and
keys."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Angles = tuple[Tensor, Tensor]  # cosines and sines [B or 1, S, 1, 1, D / 2]
WIDEST = 512  # largest head width of the kernel on a GPU


def frequencies(width: int, base: float, device: torch.device) -> Tensor:
    """Return base^(-2i / width) for i < width / 2, in radians per position, fp32."""
    return 1.0 / base ** (torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)


def scaled_frequencies(inv_freq: Tensor, factor: float, low: float, high: float, original_length: int) -> Tensor:
    """Return frequencies scaled as in Llama 3.1: divided by `factor` below `low` turns per original length, unchanged
    above `high` turns, and interpolated in between."""
    turns = original_length * inv_freq / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * inv_freq / factor + share * inv_freq


def rotary(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [..., S, width / 2], fp32, of positions [..., S]."""
    angles = positions.unsqueeze(-1).float() * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + width / 2) of x [..., width] by an angle, in fp32. cos, sin [..., width / 2]."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def rope(
    qkv: Tensor,
    angles: Angles | None,
    gains: tuple[Tensor | None, Tensor | None] = (None, None),
    eps: float | None = None,
    fused: bool = False,
) -> Tensor:
    """Return qkv [B, S, K, G + 2, D], with G query heads, k and v for each of K groups, after normalizing and rotating
    queries and keys.

    `angles`: cosines and sines [B or 1, S, 1, 1, D / 2], fp32; None: no rotation. `eps`: epsilon of an RMS norm of each
    head; None: no norm. `gains`: gains [D] of the norms of queries and keys, in qkv's dtype or fp32; None: 1. The fused
    kernel does not round between norm and rotation. It saves qkv for the backward pass only if there is a norm.
    """
    if angles is None and eps is None:
        return qkv
    if fused and (qkv.device.type == "cpu" or qkv.shape[-1] <= WIDEST):
        cos, sin = angles or (None, None)
        return _Rope.apply(qkv, cos, sin, *gains, eps)
    *parts, v = qkv[..., :-2, :], qkv[..., -2:-1, :], qkv[..., -1:, :]
    if eps is not None:
        parts = [_normed(part, gain, eps) for part, gain in zip(parts, gains, strict=True)]
    if angles is not None:
        parts = [rotate(part, *angles) for part in parts]
    return torch.cat([*parts, v], -2)


def _normed(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    wide = x if gain is None else x.to(gain.dtype)
    return F.rms_norm(wide, x.shape[-1:], gain, eps).to(x.dtype)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        q_gain: Tensor | None,
        k_gain: Tensor | None,
        eps: float | None,
    ) -> Tensor:
        ctx.save_for_backward(None if eps is None else qkv, cos, sin, q_gain, k_gain)
        ctx.eps = eps
        return torch.ops.gptlite.rope(qkv, cos, sin, q_gain, k_gain, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor):
        *given, q_gain, k_gain = ctx.saved_tensors
        dqkv, dq_gain, dk_gain = torch.ops.gptlite.rope_backward(dout, *given, q_gain, k_gain, ctx.eps)
        return dqkv, None, None, None if q_gain is None else dq_gain, None if k_gain is None else dk_gain, None
