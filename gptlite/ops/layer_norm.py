"""Layer norm over the last dimension, alone or after an addition to the residual stream."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptlite.ops.dropout import DropoutKey, dropout, kernel_key


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, fused: bool = False, apex: bool = False
) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias, arXiv:1607.06450. x [..., D]; weight, bias [D].

    `fused` uses our kernel; `apex` uses NVIDIA Apex's, which needs a bias.
    """
    if apex:
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine  # type: ignore[import-not-found]

        return fused_layer_norm_affine(x, weight, bias, weight.shape, eps)
    if fused:
        return _LayerNorm.apply(x, weight, bias, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def residual_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    p: float = 0.0,
    key: DropoutKey | None = None,
    fused: bool = False,
    x_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the layer norm of h = residual + dropout(x + x_bias), and h, both [B, S, D]. x_bias is [D].

    `key=None` turns dropout off.
    """
    # The kernel adds the bias itself, unless dropout has to run before it.
    if x_bias is not None and not (fused and (key is None or not key.gap)):
        x, x_bias = x + x_bias, None
    if fused and key is not None and key.gap:  # the kernel supports one run of positions
        x, p, key = dropout(x, p, key, fused), 0.0, None
    if fused:
        return _ResidualNorm.apply(x, x_bias, residual, weight, bias, eps, p, key)
    h = residual + dropout(x, p, key)
    return layer_norm(h, weight, bias, eps), h


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        y, mean, rstd = torch.ops.gptlite.layer_norm(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        dx, dweight, dbias = torch.ops.gptlite.layer_norm_backward(dy, *ctx.saved_tensors, ctx.has_bias)
        return dx, dweight, dbias if ctx.has_bias else None, None


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_bias: Tensor | None,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        p: float,
        key: DropoutKey | None,
    ) -> tuple[Tensor, Tensor]:
        p, seed, site, sample_ids, first, _ = kernel_key(p, key)
        ctx.key, ctx.has_biases = (p, seed, first), (x_bias is not None, bias is not None)
        ctx.set_materialize_grads(False)  # the last sum is not used elsewhere and has no gradient
        y, h, mean, rstd = torch.ops.gptlite.residual_norm(
            x, x_bias, residual, weight, bias, eps, p, seed, site, sample_ids, first
        )
        ctx.save_for_backward(h, weight, mean, rstd, site, sample_ids)
        return y, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None):
        h, weight, mean, rstd, site, sample_ids = ctx.saved_tensors
        dy = torch.zeros_like(h) if dy is None else dy
        p, seed, first = ctx.key
        dx, dresidual, dx_bias, dweight, dbias = torch.ops.gptlite.residual_norm_backward(
            dy, dh, h, weight, mean, rstd, *ctx.has_biases, p, seed, site, sample_ids, first
        )
        dropped = p > 0.0 and site is not None
        biases = [grad if has else None for grad, has in zip((dx_bias, dbias), ctx.has_biases, strict=True)]
        return dx if dropped else dresidual, biases[0], dresidual, dweight, biases[1], None, None, None
