"""RMS norm over all query heads together, or over all key heads together (OLMo 2, arXiv:2501.00656; OLMoE,
arXiv:2409.02060)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.tensor import TensorAxis, cut, summed


class HeadsNorm(nn.Module):
    """RMS norm of x [B, S, K, G, D], K groups of G heads, over the last three dimensions, in fp32, with a gain for each
    element.

    A tensor-parallel rank has some of the K groups, so the sum of squares is added up over the ranks.
    """

    def __init__(self, heads: int, width: int, eps: float, *, gain: bool) -> None:
        super().__init__()
        self.axis: TensorAxis | None = None
        self.size, self.eps = heads * width, eps
        self.weight = nn.Parameter(torch.ones(self.size)) if gain else None

    def cut_(self, axis: TensorAxis) -> HeadsNorm:
        """Keep only this rank's heads, and return the module."""
        self.axis = axis
        if self.weight is not None:
            self.weight = cut(self.weight, axis, 0)
        return self

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        squares = wide.square().sum((-3, -2, -1), keepdim=True)
        if self.axis is not None:
            squares = summed(squares, self.axis)
        normed = wide * torch.rsqrt(squares / self.size + self.eps)
        if self.weight is not None:
            normed = normed * local_tensor(self.weight).to(x.dtype).float().view(x.shape[2:])
        return normed.to(x.dtype)
