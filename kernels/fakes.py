"""Fake kernels for torch.compile: shapes, dtypes and strides of the results of each op."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gptlite.kernels.activation import is_gated


def register() -> None:
    """Register all fake kernels. The library must be loaded."""
    for name, fake in FAKES.items():
        torch.library.register_fake(f"gptlite::{name}", fake)


def _like(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _nothing(*_: Any) -> None:
    return None


def _fp32(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


def _row(x: Tensor) -> Tensor:
    """Return an empty fp32 tensor with one number for each row."""
    return _fp32(x, *x.shape[:-1])


def _if(wanted: bool, x: Tensor) -> Tensor:
    """Return an empty tensor like x if `wanted`, else a tensor without elements, as the kernels do."""
    return x.new_empty(x.shape if wanted else 0)


def _mean(x: Tensor, rms: bool) -> Tensor:
    return _fp32(x, 0) if rms else _row(x)


def _layer_norm(x, weight, bias, eps, rms=False):
    return _like(x), _mean(x, rms), _row(x)


def _layer_norm_backward(dy, x, weight, mean, rstd, has_bias):
    return _like(x), _parameter(weight, x, weight is not None), _parameter(weight, x, has_bias)


def _residual_norm(x, bias, residual, weight, beta, eps, *options):
    *_, rms = (*options, False)[:6]  # five dropout options, then rms, False by default
    return _like(x), _like(x), _mean(x, rms), _row(x)


def _amax(fake: Callable) -> Callable:
    """Return the fake of an op that also returns the amax of its first result."""

    def both(x: Tensor, *others: Any) -> tuple[Tensor, ...]:
        results = fake(x, *others)
        return *((results,) if isinstance(results, Tensor) else results), _fp32(x)

    return both


def _quantize_fp8(x: Tensor, amax: Tensor, e5m2: bool, both: bool) -> tuple[Tensor, Tensor, Tensor]:
    transposed = (x.shape[1], x.shape[0]) if both else (0,)
    return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(transposed, dtype=torch.uint8), _fp32(x)


def _bias_activation_backward(dy: Tensor, x: Tensor, bias: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
    return _like(x), x.new_empty(0) if bias is None else _like(bias)


def _parameter(weight: Tensor | None, x: Tensor, wanted: bool) -> Tensor:
    """Return the gradient of a norm's parameter, in the dtype of the weight, or of x if there is no weight."""
    return (x if weight is None else weight).new_empty(x.shape[-1] if wanted else 0)


def _residual_norm_backward(dy, dh, h, weight, mean, rstd, has_bias, has_beta, *dropout):
    p, _, site, *_ = dropout
    dx = _if(p > 0 and site is not None, h)
    wanted = has_bias, weight is not None, has_beta
    return dx, _like(h), *(_parameter(weight, h, each) for each in wanted)


def _bias_activation(x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    *leading, width = x.shape
    return x.new_empty(*leading, width // 2 if is_gated(kind) else width)


def _rope_backward(dout, qkv, cos, sin, q_gain, k_gain, eps):
    return _like(dout), *(dout.new_empty(0) if gain is None else _like(gain) for gain in (q_gain, k_gain))


def _join_heads(dq: Tensor, dk: Tensor, dv: Tensor, bias: bool, fp32: bool) -> tuple[Tensor, Tensor]:
    batch, length, groups, width = dk.shape
    dqkv = dq.new_empty(batch, length, groups, dq.shape[2] // groups + 2, width)
    return dqkv, dq.new_empty(dqkv.shape[2:].numel() if bias else 0, dtype=torch.float32 if fp32 else None)


def _weight_gradient(dy: Tensor, x: Tensor, bias: bool, fp32: bool) -> tuple[Tensor, Tensor]:
    dtype, outputs = torch.float32 if fp32 else x.dtype, dy.shape[-1]
    return x.new_empty(outputs, x.shape[-1], dtype=dtype), x.new_empty(outputs if bias else 0, dtype=dtype)


def _by_position(x: Tensor) -> Tensor:
    """Return an empty tensor [B, H, S, D] with the memory layout [B, S, H, D]."""
    return _like(x.transpose(1, 2)).transpose(1, 2)


def _attention_packed(qkv: Tensor, scale: float, window: int = 0) -> tuple[Tensor, Tensor]:
    batch, positions, heads, _, width = qkv.shape
    return qkv.new_empty(batch, positions, heads, width), _fp32(qkv, batch, heads, positions)


FAKES: dict[str, Callable] = {
    **dict.fromkeys(("masked_softmax", "masked_softmax_backward", "causal_softmax", "causal_softmax_backward"), _like),
    **dict.fromkeys(("masked_softmax_", "masked_softmax_backward_", "cross_entropy_gradient_"), _nothing),
    **dict.fromkeys(("causal_softmax_", "causal_softmax_backward_", "adamw_", "add_token_rows_"), _nothing),
    "layer_norm": _layer_norm,
    "layer_norm_backward": _layer_norm_backward,
    "residual_norm": _residual_norm,
    "residual_norm_backward": _residual_norm_backward,
    "bias_activation": _bias_activation,
    "bias_activation_backward": _bias_activation_backward,
    "layer_norm_amax": _amax(_layer_norm),
    "residual_norm_amax": _amax(_residual_norm),
    "residual_norm_amax_backward": _amax(_residual_norm_backward),
    "bias_activation_amax": _amax(_bias_activation),
    "bias_activation_amax_backward": _amax(_bias_activation_backward),
    "quantize_fp8": _quantize_fp8,
    "rope": _like,
    "rope_backward": _rope_backward,
    "join_heads": _join_heads,
    "dropout": _like,
    "cross_entropy_": lambda logits, *_: _fp32(logits, logits.shape[0]),
    "cross_entropy_stats": lambda logits, *_: _fp32(logits, logits.shape[0], 2),
    "quantize_blocks": lambda x, _, bits: x.new_empty(x.shape[0] * (4 + x.shape[1] * bits // 8), dtype=torch.uint8),
    "dequantize_blocks": lambda message, _, blocks, bits: _fp32(message, blocks, 1024 if bits == 1 else 256),
    "norm": lambda tensors: _fp32(tensors[0]),
    "weight_gradient": _weight_gradient,
    "attention": lambda q, k, v, scale, window=0: (_by_position(q), _row(q)),
    "attention_backward": lambda dout, out, lse, *qkv_and_options: tuple(map(_by_position, qkv_and_options[:3])),
    "attention_packed": _attention_packed,
    "attention_packed_backward": lambda dout, out, lse, qkv, scale, window=0: _like(qkv),
}
