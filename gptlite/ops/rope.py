"""Rotary position embeddings (RoPE, Su et al. 2021, arXiv:2104.09864)."""

import math

import torch
from torch import Tensor


def frequencies(width: int, base: float, device: torch.device) -> Tensor:
    """Return base^(-2i / width) for i < width / 2, in radians per position, fp32."""
    return 1.0 / base ** (torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)


def scaled_frequencies(found: Tensor, factor: float, low: float, high: float, original_length: int) -> Tensor:
    """Return Llama 3.1's frequencies: divided by `factor` below `low` turns per original length, unchanged above `high`
    turns, and interpolated between."""
    turns = original_length * found / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * found / factor + share * found


def rotary(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [..., S, width / 2], fp32, of positions [..., S]."""
    angles = positions.unsqueeze(-1).float() * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + width / 2) of x [..., width] by an angle, in fp32. cos, sin [..., width / 2]."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
