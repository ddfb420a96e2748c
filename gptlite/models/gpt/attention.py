"""Multi-head causal self-attention."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from gptlite.models.gpt.cache import LayerCache
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.values import ValueMix
from gptlite.models.layers import Linear, RMSNorm
from gptlite.models.parallel_layers import HeadsNorm
from gptlite.ops.attention import Mask, Spans, causal_attention, heads, packed_causal_attention
from gptlite.ops.dropout import DropoutKey
from gptlite.ops.rope import Angles, rope
from gptlite.ops.select import Ops
from gptlite.ops.weight_copies import as_dtype


class TensorCut(Protocol):
    """Interface of the tensor axis for a model whose layers are sharded over the tensor-parallel ranks."""

    sequence: bool  # True if activations between layers are slices of the sequence
    rank: int
    size: int

    def columns(self, x: Tensor, wanted: Sequence[Sequence[range]]) -> Tensor:
        """Exchange columns between ranks. x [B, S, f / size] has this rank's share of the f columns. Return the columns
        that this rank wants; see TensorAxis."""
        ...


class ContextCut(Protocol):
    """Interface of the context axis for a model. Each rank has an early and a late chunk of every sequence."""

    size: int  # number of ranks
    whole: bool  # True while sequences are not sharded

    def starts(self, length: int) -> tuple[int, int]:
        """Return the first position of each of this rank's two chunks, which together have `length` positions."""
        ...

    def positions(self, first: int, count: int, length: int) -> tuple[int, int]:
        """Map `count` of this rank's `length` positions, from `first` on, to the whole sequence. Return the position of
        the first one, and the additional offset of the second half."""
        ...

    def gather_keys_and_values(
        self, qkv: Tensor
    ) -> tuple[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]], list[Tensor]]:
        """Return the keys and values [B, H, end of the chunk, D] to which the queries of each chunk may attend, and the
        tensors that own their memory."""
        ...

    def free_until_backward(self, out: Tensor, qkv: Tensor, memory: list[Tensor]) -> Tensor:
        """Return `out`, the output of attention, and free `memory` until the backward pass of attention."""
        ...


class CausalSelfAttention(nn.Module):
    """Causal self-attention: x [B, S, d] -> [B, S, d].

    The rows of the fused QKV projection are grouped by key/value head (queries, k and v of head 0, then those of head
    1, ...), so that a tensor-parallel shard of whole heads is one contiguous block of rows. Each key/value head has one
    query head, or G with grouped-query attention. `layer` is the layer's index.
    """

    def __init__(self, config: GPTConfig, ops: Ops, layer: int = 0) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.kv_heads, self.group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        self.tensor_axis: TensorCut | None = None  # set if this rank holds only some of the heads
        self.dropout = config.dropout
        self.implementation, self.fused_scores, self.fused_rope = ops.attention, ops.fused_scores, ops.rope
        self.context: ContextCut | None = None  # set if sequences are sharded over ranks
        self.qkv = Linear(config.d_model, config.qkv_size, bias=config.bias, fused=ops.linear)
        self.proj = Linear(config.query_size, config.d_model, bias=config.bias, fused=ops.linear)
        self.q_norm: RMSNorm | HeadsNorm | None = None
        self.k_norm: RMSNorm | HeadsNorm | None = None
        if config.qk_norm and config.qk_norm_heads:
            norm = {"gain": config.norm_gain, "of_heads": True}
            self.q_norm, self.k_norm = (RMSNorm(self.head_width, config.norm_eps, **norm) for _ in range(2))
        elif config.qk_norm:
            sizes = self.head_width, config.norm_eps
            self.q_norm = HeadsNorm(config.num_heads, *sizes, gain=config.norm_gain)
            self.k_norm = HeadsNorm(config.num_kv_heads, *sizes, gain=config.norm_gain)
        self.gives_values = config.value_residual and layer == 0
        self.values = ValueMix() if config.value_residual and layer > 0 else None
        # The kernel that writes qkv's gradient also sums the bias's, if nothing changes qkv before attention.
        self.joins_heads = ops.fused_scores and not config.qk_norm and not config.value_residual

    def forward(
        self,
        x: Tensor,
        key: DropoutKey | None = None,
        cache: LayerCache | None = None,
        mask: Mask = None,
        rotary: Angles | None = None,
        first: Tensor | None = None,
        *,
        bias: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention's output, and the values [B, S, K, 1, D] if later layers take them as `first`, otherwise
        None.

        `mask`: bool [B, 1, S, length of the whole sequence], True for earlier keys that a query must not attend to, or
        a window. Without dropout and context parallelism, it may also be the spans of documents. `rotary`: cosines and
        sines that rotate queries and keys. `first`: the first layer's values, for ValueMix. If `bias` is False, the
        next op adds the output projection's bias.
        """
        # The local number of heads follows from the tensor, so that a shard of the heads needs no special code.
        whole = self.context is None or self.context.whole
        joined = self.joins_heads and rotary is None and cache is None and whole and not isinstance(mask, Spans)
        bias_of = self.qkv if joined and isinstance(self.qkv, Linear) else None
        qkv = self.qkv(x) if bias_of is None else bias_of.without_bias_gradient(x)
        batch, length, _ = qkv.shape  # not those of x, which may be a slice of the sequence
        qkv = self._positioned(self._split(qkv), rotary)
        values = qkv[..., -1:, :].contiguous() if self.gives_values else None
        if self.values is not None:
            assert first is not None
            qkv = torch.cat([qkv[..., :-1, :], self.values(qkv[..., -1:, :], first)], -2)
        if key is not None:
            # Dropout masks are keyed by global head indices, so that they do not depend on the layout.
            heads_before = 0 if self.tensor_axis is None else self.tensor_axis.rank * qkv[..., :-2, 0].shape[2:].numel()
            key = replace(key, first_head=heads_before)
        if self.context is not None and not whole:
            out = self._over_ranks(qkv, key, mask, self.context)
        elif cache is None:
            options = self.fused_scores, None if bias_of is None else bias_of.bias
            out = packed_causal_attention(qkv, self.implementation, self.dropout, key, mask, *options)
        else:
            q, k, v = heads(qkv)
            k, v = cache.append(k, v)
            assert not isinstance(mask, Spans)
            out = causal_attention(q, k, v, self.implementation, self.dropout, key, mask).transpose(1, 2)
        out = out.reshape(batch, length, -1)
        return (self.proj(out) if bias else self.proj.project(out)), values

    def _split(self, qkv: Tensor) -> Tensor:
        """Return the projection's outputs on this rank as [B, S, K, G + 2, D].

        If there are more tensor-parallel ranks than key/value heads, several ranks share a head. Each of these ranks
        holds an equal share of the rows of that head's group. A rank exchanges outputs with the others to get its
        queries and a copy of k and v.
        """
        axis, group = self.tensor_axis, self.group
        if axis is not None and axis.size > self.kv_heads:
            ranks = axis.size // self.kv_heads  # number of ranks that share a key/value head
            group //= ranks
            qkv = axis.columns(qkv, [self._rows(rank // ranks, rank % ranks, group) for rank in range(axis.size)])
        return qkv.view(*qkv.shape[:2], -1, group + 2, self.head_width)

    def _rows(self, head: int, share: int, queries: int) -> list[range]:
        """Return the rows of the QKV projection that a rank needs. In the group of key/value head `head`, these are the
        rows of share number `share`, which has `queries` query heads, and those of k and v."""
        width = self.head_width
        first, values = (head * (self.group + 2) + share * queries) * width, (head + 1) * (self.group + 2) * width
        return [range(first, first + queries * width), range(values - 2 * width, values)]

    def _positioned(self, qkv: Tensor, rotary: Angles | None) -> Tensor:
        """Return qkv with normalized and rotated queries and keys."""
        if isinstance(self.q_norm, HeadsNorm) and isinstance(self.k_norm, HeadsNorm):
            q, k, v = qkv[..., :-2, :], qkv[..., -2:-1, :], qkv[..., -1:, :]
            qkv = torch.cat([self.q_norm(q), self.k_norm(k), v], -2)
        if not isinstance(self.q_norm, RMSNorm) or not isinstance(self.k_norm, RMSNorm):
            return rope(qkv, rotary, fused=self.fused_rope)
        gains = _gain(self.q_norm, qkv.dtype), _gain(self.k_norm, qkv.dtype)
        return rope(qkv, rotary, gains, self.q_norm.eps, self.fused_rope)

    def _over_ranks(self, qkv: Tensor, key: DropoutKey | None, mask: Mask, context: ContextCut) -> Tensor:
        """Return attention's output [B, s, K G, D] for the queries of this rank's two chunks, which attend to the whole
        sequence. qkv is [B, s, K, G + 2, D]."""
        assert not isinstance(mask, Spans)
        length = qkv.shape[1]
        pairs, memory = context.gather_keys_and_values(qkv)
        queries = qkv[:, :, :, :-2].flatten(2, 3).transpose(1, 2).chunk(2, 2)
        masks = mask.chunk(2, 2) if isinstance(mask, Tensor) else (mask, mask)
        outs, options = [], {"fused_scores": self.fused_scores}
        for q, (k, v), start, hidden in zip(queries, pairs, context.starts(length), masks, strict=True):
            own = None if key is None else replace(key, first_position=start)
            seen = hidden[..., : k.shape[2]] if isinstance(hidden, Tensor) else hidden
            out = causal_attention(q, k, v, self.implementation, self.dropout, own, seen, **options)
            outs.append(out.transpose(1, 2))
        return context.free_until_backward(torch.cat(outs, 1), qkv, memory)


def _gain(norm: RMSNorm, dtype: torch.dtype) -> Tensor | None:
    return norm.weight if norm.weight is None or norm.fp32 else as_dtype(norm.weight, dtype)
