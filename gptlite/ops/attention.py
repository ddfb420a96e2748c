"""Causal self-attention with a choice of implementations."""

import math
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from gptlite.ops.config import QUERY_BLOCK, Attention
from gptlite.ops.dropout import DropoutKey, dropout
from gptlite.ops.softmax import causal_softmax, future, masked_softmax
from gptlite.torch_private.ops import flash_attention, flash_window_attention, softmax_backward

ONE_QUERY = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Spans(NamedTuple):
    """Boundaries of N documents in B concatenated sequences of length S.

    `cumulative`, int32 [N + 1]: the start of each document, then the end of the last one. Documents may be empty. No
    document is longer than `longest`. A query attends to `window` positions, up to its own; 0: to all.
    """

    cumulative: Tensor
    longest: int
    window: int = 0


# True where a key is hidden, besides later ones; or the number of positions, up to its own, that a query attends to.
Mask = Tensor | Spans | int | None


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: Attention,
    dropout_p: float = 0.0,
    key: DropoutKey | None = None,
    mask: Tensor | int | None = None,
    fused_scores: bool = False,
) -> Tensor:
    """Return softmax(q kᵀ / sqrt(D) + causal mask) v.

    q [B, H, Sq, D]; k, v [B, H, Sk, D], Sq <= Sk: the queries are the last Sq positions. Returns [B, H, Sq, D]. If k
    and v have fewer heads, each serves several consecutive query heads (grouped-query attention, arXiv:2305.13245).
    `mask`, bool and broadcast to [B, H, Sq, Sk], also hides the keys where it is True; a query without visible keys
    gets zeros. An integer is a window, the number of keys up to its own that a query sees.

    With dropout, scores are always materialized, since SDPA's dropout would depend on the layout. With a mask, they are
    materialized unless `choice` is `sdpa`, but our kernel and flash attention skip keys outside a window.
    `fused_scores`: materialized scores use our softmax and dropout kernels. The choices `fused` and `fused_softmax`
    always use these kernels.
    """
    dropping = dropout_p > 0.0 and key is not None
    k, v = (_for_queries(each, q.shape[1]) for each in (k, v))
    if isinstance(mask, int):
        if choice is Attention.fused and not dropping:
            return _FusedAttention.apply(mask, q, k, v)
        if choice in (Attention.sdpa, Attention.fa3) and not dropping and _takes_flash(q, k, v):
            return flash_window_attention(q, k, v, mask)
        mask = ~future(q.shape[2], k.shape[2], q.device, mask)
    if mask is not None and choice is Attention.sdpa and not dropping:
        hidden = mask | future(q.shape[-2], k.shape[-2], q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)  # SDPA's masks are True for visible keys
    if dropping or mask is not None or choice is Attention.fused_softmax:
        fused = fused_scores or choice in (Attention.fused_softmax, Attention.fused)
        return _written_out(q, k, v, mask, dropout_p, key if dropping else None, fused)
    if q.shape[-2] == 1 or choice in (Attention.sdpa, Attention.cudnn, Attention.fa3):
        return _sdpa(q, k, v, choice)
    if choice is Attention.fused:
        return _FusedAttention.apply(0, q, k, v)
    batch, heads, queries, width = q.shape
    flat = [t.reshape(batch * heads, t.shape[2], width) for t in (q, k, v)]
    return _MatmulAttention.apply(*flat).view(batch, heads, queries, width)


def packed_causal_attention(
    qkv: Tensor,
    choice: Attention,
    dropout_p: float = 0.0,
    key: DropoutKey | None = None,
    mask: Mask = None,
    fused_scores: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Return causal attention of a QKV projection's output qkv [B, S, K, G + 2, D], with G query heads, k and v for
    each of K key/value heads. The result is [B, S, K G, D].

    Arguments are as in `causal_attention`. `mask` may also be `Spans`, for flash attention restricted to documents,
    without dropout. `fused_scores` and `bias`: see `heads`.
    """
    if isinstance(mask, Spans):
        spans, window = (mask.cumulative, mask.cumulative, mask.longest, mask.longest), (mask.window - 1, 0)
        packed = qkv.flatten(0, 1)
        q, (k, v) = packed[:, :, :-2].flatten(1, 2), packed[:, :, -2:].unbind(2)
        k, v = (_for_queries(each, q.shape[1]) for each in (k, v))
        out = cast(Tensor, varlen_attn(q, k, v, *spans, window_size=window))
        return out.view(*qkv.shape[:2], *out.shape[1:])
    plain = qkv.shape[3] == 3 and qkv.shape[1] > 1 and not isinstance(mask, Tensor)
    if plain and choice is Attention.fused and (dropout_p == 0.0 or key is None):
        return _FusedAttention.apply(mask or 0, qkv)
    q, k, v = heads(qkv, bias, fused_scores)
    return causal_attention(q, k, v, choice, dropout_p, key, mask, fused_scores).transpose(1, 2)


def heads(qkv: Tensor, bias: Tensor | None = None, fused: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [B, K G, S, D], and k and v [B, K, S, D], of qkv [B, S, K, G + 2, D]. Views, except q if G > 1.

    The gradient of qkv is written in one pass. `fused`: by our kernel, which also sums the gradient of `bias`. The bias
    [K (G + 2) D] is already part of qkv, added without a gradient.
    """
    return _Heads.apply(qkv, bias, fused)


def _for_queries(x: Tensor, heads: int) -> Tensor:
    """Repeat the heads of keys or values, in dim 1, to match the number of query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, choice: Attention) -> Tensor:
    square, several = q.shape[-2] == k.shape[-2], q.shape[-2] > 1
    if several and not square and _takes_flash(q, k, v):
        return flash_attention(q, k, v, is_causal=True)
    # SDPA's is_causal aligns the first query with the first key; here the last ones are aligned.
    mask = ~future(q.shape[-2], k.shape[-2], q.device) if several and not square else None
    backends = _backends(choice, q.device, several) if mask is None else []
    with sdpa_kernel(backends) if backends else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=square and several)


def _backends(choice: Attention, device: torch.device, several: bool) -> list[SDPBackend]:
    """Return the SDPA kernels that may run; an empty list allows all. `several`: more than one query; generation has
    one."""
    if not several:  # cuDNN would build a new plan for every number of keys
        return ONE_QUERY if device.type == "cuda" else []
    return {Attention.cudnn: [SDPBackend.CUDNN_ATTENTION], Attention.fa3: [SDPBackend.FLASH_ATTENTION]}.get(choice, [])


def _takes_flash(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return True if flash attention supports fewer queries than keys, and windows, here. torch's causal_lower_right
    cannot be created under a dispatch mode, such as the one of selective checkpointing."""
    if q.device.type != "cuda" or q.shape[-1] % 8:
        return False
    if torch.compiler.is_compiling():  # torch.compile cannot trace SDPAParams before torch 2.15
        return q.element_size() == 2 and q.shape[-1] <= 256 and _from_ampere_on(q.device.index)
    return can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, False))


@torch.compiler.assume_constant_result
def _from_ampere_on(device: int | None) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, key: DropoutKey | None, fused: bool
) -> Tensor:
    scores, scale = q @ k.transpose(-2, -1), 1.0 / math.sqrt(q.shape[-1])
    if mask is None:
        probabilities = causal_softmax(scores, scale, fused)
    else:
        probabilities = masked_softmax(scores, mask | future(q.shape[-2], k.shape[-2], q.device), scale, fused)
    return dropout(probabilities, p, key, fused) @ v


class _Heads(torch.autograd.Function):
    """The heads of qkv. Autograd's own gradient would add three tensors that are mostly zeros."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor | None, fused: bool) -> tuple[Tensor, ...]:
        ctx.fused, ctx.bias = fused, None if bias is None else bias.dtype
        q, k, v = qkv[:, :, :, :-2].flatten(2, 3), qkv[:, :, :, -2], qkv[:, :, :, -1]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        if ctx.fused:
            options = ctx.bias is not None, ctx.bias is torch.float32
            dqkv, dbias = torch.ops.gptlite.join_heads(dq, dk, dv, *options)
            return dqkv, None if ctx.bias is None else dbias, None
        dq = dq.unflatten(2, (dk.shape[2], -1))
        return torch.cat([dq, dk.unsqueeze(3), dv.unsqueeze(3)], 3), None, None


class _FusedAttention(torch.autograd.Function):
    """Attention by our CPU kernel: of q, k, v with any strides, or of packed qkv [B, S, H, 3, D], without copying q, k
    and v. `window` is the number of keys, up to its own, that a query sees; 0 for all."""

    @staticmethod
    def forward(ctx: Any, window: int, *qkv: Tensor) -> Tensor:
        ops, ctx.options = torch.ops.gptlite, (1.0 / math.sqrt(qkv[0].shape[-1]), window)
        out, lse = (ops.attention_packed if len(qkv) == 1 else ops.attention)(*qkv, *ctx.options)
        ctx.save_for_backward(out, lse, *qkv)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        saved = ctx.saved_tensors  # read once: checkpoint recomputation allows only one access
        ops, packed = torch.ops.gptlite, len(saved) == 3
        backward = ops.attention_packed_backward if packed else ops.attention_backward
        grads = backward(grad, *saved, *ctx.options)
        return (None, grads) if packed else (None, *grads)


def _probabilities(q: Tensor, k: Tensor, start: int, end: int, scale: float) -> Tensor:
    """Return the attention probabilities [N, end - start, keys] of queries `start` to `end - 1`, without keys after the
    last of these queries."""
    keys = end + k.shape[1] - q.shape[1]
    bias = torch.zeros(end - start, keys, dtype=q.dtype, device=q.device)
    bias.masked_fill_(future(end - start, keys, q.device), float("-inf"))
    # Mask and scale are part of the matrix multiplication, which saves two passes over the scores.
    return torch.softmax(torch.baddbmm(bias, q[:, start:end], k[:, :keys].transpose(1, 2), alpha=scale), dim=-1)


class _MatmulAttention(torch.autograd.Function):
    """Attention of [N, S, D] tensors, one block of queries at a time.

    The backward pass recomputes the scores (as in FlashAttention, arXiv:2205.14135). With a single block, the
    probabilities are saved instead.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
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
    def backward(ctx: Any, grad: Tensor):
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
            dscores = softmax_backward(dscores, p, -1, p.dtype)
            # scaled here, since dq has fewer elements than dscores
            dq[:, start:end] = torch.bmm(dscores, k[:, :keys]) * scale
            dk[:, :keys] += torch.bmm(dscores.transpose(1, 2), q[:, start:end]) * scale
        return dq, dk, dv
