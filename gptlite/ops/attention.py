"""Causal self-attention: torch's SDPA on a GPU, batched matmuls on a CPU (three times faster there in bf16)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptlite.ops.config import Attention
from gptlite.ops.dropout import DropoutKey, dropout

QUERY_BLOCK = 256  # queries whose scores exist at once: bounds memory, and skips the masked upper triangle


def select_attention(choice: Attention, device: torch.device) -> tuple[Attention, str]:
    """The attention that runs and why."""
    if choice is not Attention.auto:
        return choice, "asked for"
    if device.type == "cpu":
        return Attention.matmul, "batched matmuls are faster than SDPA on a CPU"
    return Attention.sdpa, "torch picks flash, efficient or cuDNN attention"


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, choice: Attention, dropout_p: float = 0.0, key: DropoutKey | None = None
) -> Tensor:
    """softmax(q kᵀ / sqrt(D) + causal mask) v.

    q [B, H, Sq, D]; k, v [B, H, Sk, D], Sq <= Sk: the queries are the last Sq positions. Returns [B, H, Sq, D].
    Attention dropout always writes the scores out: SDPA's own mask would depend on the layout.
    """
    if dropout_p > 0.0 and key is not None:
        return _attention_with_dropout(q, k, v, dropout_p, key)
    if choice is Attention.sdpa or q.shape[-2] == 1:
        square = q.shape[-2] == k.shape[-2]
        mask = None if square or q.shape[-2] == 1 else ~_future(q.shape[-2], k.shape[-2], q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=square and q.shape[-2] > 1)
    batch, heads, queries, width = q.shape
    flat = [t.reshape(batch * heads, t.shape[2], width) for t in (q, k, v)]
    return _MatmulAttention.apply(*flat).view(batch, heads, queries, width)


def _future(queries: int, keys: int, device: torch.device) -> Tensor:
    """Bool [Sq, Sk], True where the key comes after the query."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu_(keys - queries + 1)


def _attention_with_dropout(q: Tensor, k: Tensor, v: Tensor, p: float, key: DropoutKey) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(q.shape[-1]))
    scores = scores.masked_fill(_future(q.shape[-2], k.shape[-2], q.device), float("-inf"))
    return dropout(torch.softmax(scores, dim=-1), p, key) @ v


def _probabilities(q: Tensor, k: Tensor, start: int, end: int, scale: float) -> Tensor:
    """Attention probabilities [N, end-start, end'] of one block of queries, keys after the block left out."""
    keys = end + k.shape[1] - q.shape[1]
    bias = torch.zeros(end - start, keys, dtype=q.dtype, device=q.device)
    bias.masked_fill_(_future(end - start, keys, q.device), float("-inf"))
    return torch.softmax(torch.baddbmm(bias, q[:, start:end], k[:, :keys].transpose(1, 2), alpha=scale), dim=-1)


class _MatmulAttention(torch.autograd.Function):
    """Attention of [N, S, D] tensors, a block of queries at a time. The backward pass recomputes the scores
    (FlashAttention's trade, arXiv:2205.14135), but for a single block, whose probabilities it keeps."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale, offset, queries = 1.0 / math.sqrt(q.shape[-1]), k.shape[1] - q.shape[1], q.shape[1]
        out = torch.empty_like(q)
        p = None
        for start in range(0, queries, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, queries)
            p = _probabilities(q, k, start, end, scale)
            out[:, start:end] = torch.bmm(p, v[:, : end + offset])
        ctx.save_for_backward(q, k, v, p if queries <= QUERY_BLOCK else None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        q, k, v, kept = ctx.saved_tensors
        scale, offset, queries = 1.0 / math.sqrt(q.shape[-1]), k.shape[1] - q.shape[1], q.shape[1]
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for start in range(0, queries, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, queries)
            keys = end + offset
            g = grad[:, start:end]
            p = _probabilities(q, k, start, end, scale) if kept is None else kept
            dv[:, :keys] += torch.bmm(p.transpose(1, 2), g)
            dscores = torch.bmm(g, v[:, :keys].transpose(1, 2))
            dscores = torch.ops.aten._softmax_backward_data(dscores, p, -1, p.dtype)
            dq[:, start:end] = torch.bmm(dscores, k[:, :keys]) * scale
            dk[:, :keys] += torch.bmm(dscores.transpose(1, 2), q[:, start:end]) * scale
        return dq, dk, dv
