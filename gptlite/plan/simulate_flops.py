"""The arithmetic of matrix products, by the shapes that an op is given: two FLOPs a multiplication and addition.

Attention is causal: half of its scores count. Everything else a GPT does is small beside these.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any


def flops_of(func: Any, args: Any) -> int:
    """FLOPs of a dispatched op; 0 for what is no matrix product."""
    formula = FORMULAS.get(func._opname)
    return 0 if formula is None else formula(*args)


def _mm(a: Any, b: Any, *_: Any) -> int:
    """a [..., m, k] b [..., k, n]."""
    return 2 * prod(a.shape) * b.shape[-1]


def _addmm(_: Any, a: Any, b: Any, *__: Any) -> int:
    return _mm(a, b)


def _sdpa(q: Any, k: Any, v: Any, p: float = 0.0, causal: bool = False, *_: Any) -> int:
    """q [B, H, Sq, D], k [B, H, Sk, D]: scores, and what they weigh."""
    return 4 * prod(q.shape) * k.shape[-2] // (2 if causal else 1)


def _sdpa_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, p: float, causal: bool, *_: Any) -> int:
    """Scores again, and two products for each of the forward pass's two."""
    return 5 * _sdpa(q, k, v, p, causal) // 2


def _attention(q: Any, k: Any, *_: Any) -> int:
    return _sdpa(q, k, k, causal=True)


def _attention_backward(grad: Any, out: Any, lse: Any, q: Any, k: Any, *_: Any) -> int:
    return 5 * _attention(q, k) // 2


def _packed(qkv: Any, *_: Any) -> int:
    """qkv [B, S, H, 3, D]."""
    return 4 * prod(qkv.shape) // 3 * qkv.shape[1] // 2


def _packed_backward(grad: Any, out: Any, lse: Any, qkv: Any, *_: Any) -> int:
    return 5 * _packed(qkv) // 2


FORMULAS: dict[str, Callable[..., int]] = {
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "_scaled_dot_product_flash_attention_for_cpu": _sdpa,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _sdpa_backward,
    "attention": _attention,
    "attention_backward": _attention_backward,
    "attention_packed": _packed,
    "attention_packed_backward": _packed_backward,
}
