"""Multi-head causal self-attention."""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from gptlite.models.gpt.cache import LayerCache
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.layers import Linear
from gptlite.ops.attention import Spans, causal_attention, heads, packed_causal_attention
from gptlite.ops.dropout import DropoutKey
from gptlite.ops.select import Ops


class SequenceCut(Protocol):
    """The tensor axis as a model sees it: the ranks that share its layers."""

    sequence: bool  # True if activations between layers are slices of the sequence
    rank: int
    size: int


class ContextCut(Protocol):
    """The context axis as a model sees it: the ranks that share its sequences, each with an early and a late chunk."""

    size: int  # number of ranks
    whole: bool  # True while sequences are not sharded

    def starts(self, length: int) -> tuple[int, int]:
        """Return the first positions of this rank's two chunks, of `length` local positions."""
        ...

    def positions(self, first: int, count: int, length: int) -> tuple[int, int]:
        """Map `count` local positions from `first` on, of `length` local ones, to the sequence: return the first one's
        position, and the additional offset of their second half."""
        ...

    def keys_and_values(self, qkv: Tensor) -> tuple[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]], list[Tensor]]:
        """Return for each chunk the keys and values [B, H, its end, D] that its queries may attend to, and the memory
        of both."""
        ...

    def give_back(self, out: Tensor, qkv: Tensor, memory: list[Tensor]) -> Tensor:
        """Return `out`, computed from `memory`, which can be freed until the backward pass."""
        ...


class CausalSelfAttention(nn.Module):
    """x [B, S, d] -> [B, S, d].

    The fused QKV projection is grouped by head (rows: head 0's q, k, v, head 1's q, k, v, ...), so that a
    tensor-parallel shard of whole heads is one contiguous block of rows.
    """

    def __init__(self, config: GPTConfig, ops: Ops) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.tensor_axis: SequenceCut | None = None  # set if this rank holds only some of the heads
        self.dropout = config.dropout
        self.implementation, self.fused_scores = ops.attention, ops.fused_scores
        self.context: ContextCut | None = None  # set if sequences are sharded over ranks
        self.qkv = Linear(config.d_model, 3 * config.d_model, bias=config.bias, fused=ops.linear)
        self.proj = Linear(config.d_model, config.d_model, bias=config.bias, fused=ops.linear)

    def forward(
        self,
        x: Tensor,
        key: DropoutKey | None = None,
        cache: LayerCache | None = None,
        mask: Tensor | Spans | None = None,
        *,
        bias: bool = True,
    ) -> Tensor:
        """Return attention's output. `mask` is bool [B, 1, S, S of the whole sequence], True for earlier keys that a
        query must not attend to; or, without dropout and context ranks, the spans that it is limited to. Without `bias`
        the bias of the last layer is left to an op that adds it."""
        # The local number of heads follows from the tensor, so a shard of the heads needs no other code.
        qkv = self.qkv(x)
        batch, length, _ = qkv.shape  # not x's, which may be a slice of the sequence
        qkv = qkv.view(batch, length, -1, 3, self.head_dim)
        if key is not None:
            # Masks are keyed by global heads, so that they do not depend on the layout.
            key = replace(key, first_head=0 if self.tensor_axis is None else self.tensor_axis.rank * qkv.shape[2])
        if self.context is not None and not self.context.whole:
            assert not isinstance(mask, Spans)
            out = self._over_ranks(qkv, key, mask, self.context)
        elif cache is None:
            out = packed_causal_attention(qkv, self.implementation, self.dropout, key, mask, self.fused_scores)
        else:
            q, k, v = heads(qkv)
            k, v = cache.append(k, v)
            out = causal_attention(q, k, v, self.implementation, self.dropout, key).transpose(1, 2)
        out = out.reshape(batch, length, -1)
        return self.proj(out) if bias else self.proj.project(out)

    def _over_ranks(self, qkv: Tensor, key: DropoutKey | None, mask: Tensor | None, context: ContextCut) -> Tensor:
        """qkv [B, s, H, 3, D] of this rank's two chunks -> [B, s, H, D]. Queries attend to no key after their chunk."""
        length = qkv.shape[1]
        pairs, memory = context.keys_and_values(qkv)
        queries = qkv[:, :, :, 0].transpose(1, 2).chunk(2, 2)
        masks = (None, None) if mask is None else mask.chunk(2, 2)
        outs, options = [], {"fused_scores": self.fused_scores}
        for q, (k, v), start, hidden in zip(queries, pairs, context.starts(length), masks, strict=True):
            own = None if key is None else replace(key, first_position=start)
            seen = None if hidden is None else hidden[..., : k.shape[2]]
            out = causal_attention(q, k, v, self.implementation, self.dropout, own, seen, **options)
            outs.append(out.transpose(1, 2))
        return context.give_back(torch.cat(outs, 1), qkv, memory)
