"""The ops on tensors without data: shapes, dtypes and strides of their results, which torch.compile asks for."""

from collections.abc import Callable

import torch
from torch import Tensor

FP32 = torch.float32


def register() -> None:
    """Registers all of them, once the library is loaded."""
    for name, fake in FAKES.items():
        torch.library.register_fake(f"gptlite::{name}", fake)


def _like(x: Tensor, *_) -> Tensor:
    return x.new_empty(x.shape)


def _nothing(*_) -> None:
    return None


def _layer_norm(x: Tensor, weight, bias, eps) -> tuple[Tensor, ...]:
    return _like(x), _statistic(x), _statistic(x)


def _layer_norm_backward(dy, x: Tensor, weight: Tensor, mean, rstd, has_bias: bool) -> tuple[Tensor, ...]:
    return _like(x), _like(weight), _if(has_bias, weight)


def _residual_norm(x: Tensor, *_) -> tuple[Tensor, ...]:
    return _like(x), _like(x), _statistic(x), _statistic(x)


def _residual_norm_backward(
    dy, dh, h: Tensor, weight: Tensor, mean, rstd, has_bias: bool, has_beta: bool, p: float, seed, site, ids, first
) -> tuple[Tensor, ...]:
    dx = _like(h) if p > 0 and site is not None else h.new_empty(0)
    return dx, _like(h), _if(has_bias, weight), _like(weight), _if(has_beta, weight)


def _bias_gelu_backward(dy, x: Tensor, bias: Tensor | None, tanh) -> tuple[Tensor, ...]:
    return _like(x), x.new_empty(0) if bias is None else _like(bias)


def _losses(logits: Tensor, *_) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=FP32)


def _stats(logits: Tensor, *_) -> Tensor:
    return logits.new_empty(logits.shape[0], 3, dtype=FP32)


def _norm(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((), dtype=FP32)


def _weight_gradient(dy: Tensor, x: Tensor, bias: bool, fp32: bool) -> tuple[Tensor, ...]:
    dtype, outputs = FP32 if fp32 else x.dtype, dy.shape[-1]
    return x.new_empty(outputs, x.shape[-1], dtype=dtype), x.new_empty(outputs if bias else 0, dtype=dtype)


def _attention(q: Tensor, k, v, scale) -> tuple[Tensor, ...]:
    return _by_position(q), q.new_empty(q.shape[:3], dtype=FP32)


def _attention_backward(dout, out, lse, q: Tensor, k: Tensor, v: Tensor, scale) -> tuple[Tensor, ...]:
    return _by_position(q), _by_position(k), _by_position(v)


def _attention_packed(qkv: Tensor, scale) -> tuple[Tensor, ...]:
    batch, positions, heads, _, width = qkv.shape
    return qkv.new_empty(batch, positions, heads, width), qkv.new_empty(batch, heads, positions, dtype=FP32)


def _attention_packed_backward(dout, out, lse, qkv: Tensor, scale) -> Tensor:
    return _like(qkv)


def _by_position(x: Tensor) -> Tensor:
    """[B, H, S, D] whose memory is [B, S, H, D]."""
    batch, heads, positions, width = x.shape
    return x.new_empty(batch, positions, heads, width).transpose(1, 2)


def _statistic(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=FP32)


def _if(wanted: bool, weight: Tensor) -> Tensor:
    return _like(weight) if wanted else weight.new_empty(0)


FAKES: dict[str, Callable] = {
    **dict.fromkeys(("masked_softmax", "masked_softmax_backward", "causal_softmax", "causal_softmax_backward"), _like),
    **dict.fromkeys(("masked_softmax_", "masked_softmax_backward_"), _nothing),
    **dict.fromkeys(("causal_softmax_", "causal_softmax_backward_"), _nothing),
    "layer_norm": _layer_norm,
    "layer_norm_backward": _layer_norm_backward,
    "residual_norm": _residual_norm,
    "residual_norm_backward": _residual_norm_backward,
    "bias_gelu": _like,
    "bias_gelu_backward": _bias_gelu_backward,
    "dropout": _like,
    "cross_entropy_": _losses,
    "cross_entropy_stats": _stats,
    "cross_entropy_gradient_": _nothing,
    "norm": _norm,
    "adamw_": _nothing,
    "weight_gradient": _weight_gradient,
    "attention": _attention,
    "attention_backward": _attention_backward,
    "attention_packed": _attention_packed,
    "attention_packed_backward": _attention_packed_backward,
}
