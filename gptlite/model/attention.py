"""Multi-head causal self-attention."""

from dataclasses import replace

from torch import Tensor, nn

from gptlite.model.cache import LayerCache
from gptlite.model.config import GPTConfig
from gptlite.model.layers import Linear
from gptlite.ops.attention import causal_attention, packed_causal_attention
from gptlite.ops.dropout import DropoutKey
from gptlite.ops.select import Ops


class CausalSelfAttention(nn.Module):
    """x [B, S, d] -> [B, S, d].

    The fused QKV projection is grouped by head (rows: head 0's q, k, v, head 1's q, k, v, ...), so that a
    tensor-parallel shard of whole heads is one contiguous block of rows.
    """

    def __init__(self, config: GPTConfig, ops: Ops) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.first_head = 0  # of the whole model's, where this rank holds only some
        self.dropout = config.dropout
        self.implementation = ops.attention
        self.qkv = Linear(config.d_model, 3 * config.d_model, bias=config.bias, fused=ops.linear)
        self.proj = Linear(config.d_model, config.d_model, bias=config.bias, fused=ops.linear)

    def forward(self, x: Tensor, key: DropoutKey | None = None, cache: LayerCache | None = None) -> Tensor:
        # The local number of heads follows from the tensor, so a shard of the heads needs no other code.
        qkv = self.qkv(x)
        batch, length, _ = qkv.shape  # not x's, which may be a slice of the sequence
        qkv = qkv.view(batch, length, -1, 3, self.head_dim)
        if key is not None:
            key = replace(key, first_head=self.first_head)
        if cache is None:
            out = packed_causal_attention(qkv, self.implementation, self.dropout, key)
        else:
            q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind(0)  # [B, H, S, D] each
            k, v = cache.append(k, v)
            out = causal_attention(q, k, v, self.implementation, self.dropout, key).transpose(1, 2)
        return self.proj(out.reshape(batch, length, -1))
