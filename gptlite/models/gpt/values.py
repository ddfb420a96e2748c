"""Attention values mixed with the first layer's values (value residual) and with token embeddings (value
embeddings)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptlite.models.gpt.config import GPTConfig


class ValueMix(nn.Module):
    """Weighted sum of a layer's values, the first layer's values (ResFormer, arXiv:2410.17897), and an embedding of the
    token (value embeddings, as in nanochat and the records of modded-nanogpt).

    The weights are learned scalars per layer, initialized with 0.5 as in modded-nanogpt; nanochat has a gate per head.
    """

    of_heads = True  # a tensor-parallel rank has some heads, so the scalars' gradients are summed over the ranks

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.residual, embeds = config.has_value_residual(layer), config.has_value_embedding(layer)
        self.weight = nn.Parameter(torch.full((1 + self.residual + embeds,), 0.5))
        self.embedding = nn.Embedding(config.padded_vocab_size, config.kv_size) if embeds else None

    def forward(self, v: Tensor, first: Tensor | None, tokens: Tensor | None) -> Tensor:
        """Return the mixed values. v and `first` are [B, S, K, 1, D] for this rank's K heads; tokens [B, S]."""
        weights = iter(self.weight.to(v.dtype).unbind())
        mixed = next(weights) * v
        if self.residual:
            assert first is not None
            mixed = mixed + next(weights) * first.to(v.dtype)
        if self.embedding is not None:
            mixed = mixed + next(weights) * self.embedding(tokens).to(v.dtype).view_as(v)
        return mixed


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
