"""Plain layers whose parameters follow their input's dtype.

Parameters are fp32 masters; the activations carry the compute dtype. Casting here gives one device the numerics of
FSDP2's mixed precision (cast, compute, gradient back to fp32), and is a no-op where FSDP2 has cast already.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from gptlite.ops.layer_norm import layer_norm


class Linear(nn.Linear):
    """x [..., in] -> [..., out], in x's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last dimension, in x's dtype with fp32 statistics."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return layer_norm(x, self.weight.to(x.dtype), bias, self.eps)
