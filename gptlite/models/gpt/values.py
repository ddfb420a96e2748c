"""Attention values mixed with the first layer's values (value residual)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ValueMix(nn.Module):
    """Weighted sum of a layer's values and the first layer's values (ResFormer, arXiv:2410.17897).

    The two weights are learned scalars of the layer, initialized with 0.5 as in modded-nanogpt.
    """

    of_heads = True  # a tensor-parallel rank has some heads, so the scalars' gradients are summed over the ranks

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 0.5))

    def forward(self, v: Tensor, first: Tensor) -> Tensor:
        """Return the mixed values. v and `first` are [B, S, K, 1, D] for this rank's K heads."""
        own, other = self.weight.to(v.dtype).unbind()
        return own * v + other * first.to(v.dtype)


def with_values(x: Tensor, v: Tensor, width: int) -> Tensor:
    """Return the tensor that a pipeline stage sends: activations x [B, s, d] followed by `width` columns with the first
    layer's values v [B, S, K, 1, D] of this rank's heads.

    With sequence parallelism, x is a slice of the sequence, and v has as many elements as the columns. With tensor
    parallelism alone, v has fewer elements, and the remaining columns are zero.
    """
    columns = v.to(x.dtype).reshape(*x.shape[:2], -1)
    return torch.cat([x, F.pad(columns, (0, width - columns.shape[-1]))], -1)


def parted(received: Tensor, width: int, heads: int, head_width: int, slices: int) -> tuple[Tensor, Tensor]:
    """Split a tensor from `with_values` into activations and values. `slices`: the number of slices of a sequence, 1
    without sequence parallelism."""
    batch, length, whole = received.shape
    x, columns = received.split([whole - width, width], -1)
    v = columns[..., : heads * head_width * slices].reshape(batch, length * slices, heads, 1, head_width)
    return x.contiguous(), v
