"""Layers that communicate over the tensor axis: the vocabulary-parallel output head, and the norm over all heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gptlite.models.layers import Head
from gptlite.ops.cross_entropy import (
    NOTHING_KNOWN,
    HeadGemms,
    LossGradient,
    VocabShard,
    linear_cross_entropy,
    soft_capped,
)
from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.tensor import TensorAxis, cut, enter, first_row, rows_per_rank, summed


class VocabParallelHead(nn.Module):
    """Head with this rank's rows of the weight, its part of the vocabulary. In training, logits are not gathered."""

    matmul_dtype: torch.dtype | None = None
    fp8 = False

    def __init__(self, whole: Head, axis: TensorAxis) -> None:
        super().__init__()
        self.axis, self.cross_entropy, self.terms = axis, whole.cross_entropy, whole.terms
        self.weight = cut(whole.weight, axis, 0)

    def forward(
        self, hidden: Tensor, targets: Tensor | None, vocab_size: int, known: LossGradient = NOTHING_KNOWN
    ) -> Tensor:
        """Return the sum of the losses of the whole sequence, fp32; without targets, the logits [B, V] of the first
        position, fp32, gathered from all ranks.

        hidden [B, S, d], or with sequence parallelism this rank's slice [B, s, d]; targets [B, S].
        """
        hidden = hidden.to(self.matmul_dtype or hidden.dtype)
        longest = rows_per_rank(self.weight, self.axis)
        weight = local_tensor(self.weight)
        if targets is None:
            mine = (hidden[:, 0] @ weight.to(hidden.dtype).t()).float()
            return soft_capped(self.axis.gather_columns(mine, longest)[:, :vocab_size], self.terms.softcap)
        shard = VocabShard(first_row(self.weight, self.axis), longest, self.axis.gather)
        hidden = enter(hidden, self.axis)
        rows = hidden.flatten(0, 1)
        terms, gemms = self.terms.in_mode(self.training), HeadGemms(fp8=self.fp8)
        options = {"choice": self.cross_entropy, "terms": terms, "gemms": gemms, "known": known}
        return linear_cross_entropy(rows, weight, targets.flatten(), vocab_size, shard, **options)


class HeadsNorm(nn.Module):
    """RMS norm over all query heads together, or over all key heads together (OLMo 2, arXiv:2501.00656; OLMoE,
    arXiv:2409.02060): of x [B, S, K, G, D], K groups of G heads, over the last three dimensions, in fp32, with a gain
    for each element.

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
