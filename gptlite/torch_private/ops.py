"""Ops and kernels that have no public function, or whose public function is not available in all versions.

`foreach_*` are ops on lists of tensors, each in one call for all of them, as torch's own optimizers run them. `tree_*`
are functions of nested lists, tuples and dicts of tensors.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_leaves, tree_map, tree_map_only

__all__ = ("tree_iter", "tree_leaves", "tree_map", "tree_map_only")

softmax_backward: Any = torch.ops.aten._softmax_backward_data

_torch: Any = torch  # the names are not in its public type stub
foreach_add_, foreach_addcmul_, foreach_copy_ = _torch._foreach_add_, _torch._foreach_addcmul_, _torch._foreach_copy_
foreach_div, foreach_div_ = _torch._foreach_div, _torch._foreach_div_
foreach_lerp, foreach_lerp_ = _torch._foreach_lerp, _torch._foreach_lerp_
foreach_mul_, foreach_norm = _torch._foreach_mul_, _torch._foreach_norm
foreach_sign_, foreach_sqrt_ = _torch._foreach_sign_, _torch._foreach_sqrt_


def attention_choice(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Return the SDPBackend that torch would choose for causal attention, as an integer."""
    choice: Any = torch._fused_sdp_choice  # type: ignore[attr-defined]
    return choice(q, k, v, is_causal=True)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Return flash attention, whose causal mask aligns the last query with the last key."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, *arguments, **options)[0]


def flash_window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Return flash attention in which a query sees `window` keys, up to its own, and the last query the last key."""
    sizes, qkv = (q.shape[2], k.shape[2]), (each.transpose(1, 2) for each in (q, k, v))
    options = {"window_size_left": window - 1, "window_size_right": 0}
    out = torch.ops.aten._flash_attention_forward(*qkv, None, None, *sizes, 0.0, False, False, **options)[0]
    return out.transpose(1, 2)


def scaled_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the fp8 product of a [N, K], row-major, and b [K, M], column-major, plus bias [M], in a dtype.

    torch 2.11 cannot trace F.scaled_mm, which calls the same kernel.
    """
    return torch.ops.aten._scaled_mm(a, b, a_scale, b_scale, bias, out_dtype=dtype)


def version_of(tensor: Tensor) -> int:
    """Return a tensor's version, which each write in place raises."""
    return tensor._version
