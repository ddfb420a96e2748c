"""Plain layers whose parameters follow their input's dtype.

Parameters are fp32 masters; the activations carry the compute dtype. Casting here gives one device the numerics of
FSDP2's mixed precision (cast, compute, gradient back to fp32), and is a no-op where FSDP2 has cast already.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlite.ops.cross_entropy import linear_cross_entropy
from gptlite.ops.layer_norm import layer_norm


class Linear(nn.Linear):
    """x [..., in] -> [..., out], in x's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.local_bias(x.dtype))

    def project(self, x: Tensor) -> Tensor:
        """Without the bias, for an op that adds it."""
        return F.linear(x, self.weight.to(x.dtype))

    def local_bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bias in a compute dtype."""
        return None if self.bias is None else self.bias.to(dtype)


class Head(nn.Linear):
    """The output projection, and its loss."""

    def __init__(self, d_model: int, rows: int) -> None:
        super().__init__(d_model, rows, bias=False)

    def forward(self, hidden: Tensor, targets: Tensor | None, vocab_size: int) -> Tensor:
        """The sum of the losses, fp32; without targets, logits [B, V], fp32, of one position.

        hidden [B, S, d]; targets [B, S]; rows from `vocab_size` on are padding.
        """
        weight = self.weight.to(hidden.dtype)
        if targets is None:
            return (hidden[:, 0] @ weight[:vocab_size].t()).float()
        return linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten(), vocab_size)


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last dimension, in x's dtype with fp32 statistics."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return layer_norm(x, self.weight.to(x.dtype), bias, self.eps)
