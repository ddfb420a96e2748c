"""Layer norm and RMS norm over the last dimension, alone or after an addition to the residual stream."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptlite.ops.dropout import DropoutKey, dropout, kernel_key
from gptlite.ops.linear import cast
from gptlite.ops.weight_copies import as_dtype, noted, noting


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    fused: bool = False,
    apex: bool = False,
    amax: bool = False,
) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias, arXiv:1607.06450. x [..., D]; weight, bias [D].

    `fused` uses our kernel, which notes the result's amax if `amax`; `apex` uses NVIDIA Apex's, which needs a bias.
    """
    if apex:
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine  # type: ignore[import-not-found]

        return fused_layer_norm_affine(x, weight, bias, weight.shape, eps)
    if fused:
        return _Norm.apply(x, weight, bias, eps, False, noting(amax))
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, fused: bool = False, amax: bool = False) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, arXiv:1910.07467. x [..., D]; weight [D]. `fused`, `amax` as above."""
    if fused:
        return _Norm.apply(x, weight, None, eps, True, noting(amax))
    return F.rms_norm(x, x.shape[-1:], weight, eps)


class NormParameters(NamedTuple):
    """Parameters of a norm: weight and bias [D], or None. `rms`: RMS norm instead of layer norm; it has no bias, and
    may have no weight. `amax`: our kernel notes the amax of the result, and of the gradient of x."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    rms: bool = False
    amax: bool = False

    def read_by(self, x: Tensor, fused: bool) -> "NormParameters":
        """Return the parameters cast to x's dtype. Our kernel on a GPU reads them uncast, and writes their gradients in
        their dtype, which saves a launch for each."""
        if fused and x.device.type != "cpu":
            return self
        return self._replace(weight=cast(self.weight, x.dtype), bias=cast(self.bias, x.dtype))


def residual_norm(
    x: Tensor,
    residual: Tensor,
    norm: NormParameters,
    p: float = 0.0,
    key: DropoutKey | None = None,
    fused: bool = False,
    x_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norm of h = residual + dropout(x + x_bias), and h, both [B, S, D]. x_bias is [D].

    `key=None` turns dropout off.
    """
    if fused and key is not None and key.gap:  # the kernel supports only contiguous positions
        x, x_bias, p, key = dropout(biased(x, x_bias), p, key, fused), None, 0.0, None
    if fused:
        weight, bias, eps, rms, amax = norm.read_by(x, fused)
        x_bias = cast(x_bias, x.dtype if weight is None else weight.dtype)
        return _ResidualNorm.apply(x, x_bias, residual, weight, bias, (eps, rms, noting(amax)), (p, key))
    h = residual + dropout(biased(x, x_bias), p, key)
    return normed(h, norm), h


def normed(x: Tensor, norm: NormParameters, fused: bool = False, apex: bool = False) -> Tensor:
    """Return a norm of x, in x's dtype."""
    weight, bias, eps, rms, amax = norm.read_by(x, fused)
    if rms:
        return rms_norm(x, weight, eps, fused, amax)
    assert weight is not None
    return layer_norm(x, weight, bias, eps, fused, apex, amax)


def biased(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x + bias, in x's dtype."""
    return x if bias is None else x + as_dtype(bias, x.dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool, amax: bool
    ) -> Tensor:
        ops, largest = torch.ops.gptlite, None
        if amax:
            y, mean, rstd, largest = ops.layer_norm_amax(x, weight, bias, eps, rms)
        else:
            y, mean, rstd = ops.layer_norm(x, weight, bias, eps, rms)
        ctx.save_for_backward(x, weight, None if rms else mean, rstd)
        ctx.has_weight, ctx.has_bias = weight is not None, bias is not None
        return noted(y, largest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        dx, dweight, dbias = torch.ops.gptlite.layer_norm_backward(dy, *ctx.saved_tensors, ctx.has_bias)
        return dx, dweight if ctx.has_weight else None, dbias if ctx.has_bias else None, None, None, None


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_bias: Tensor | None,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        kind: tuple[float, bool, bool],
        dropping: tuple[float, DropoutKey | None],
    ) -> tuple[Tensor, Tensor]:
        (eps, rms, ctx.amax), (p, seed, site, sample_ids, first, _) = kind, kernel_key(*dropping)
        ctx.key, ctx.has = (p, seed, first), (x_bias is not None, weight is not None, bias is not None)
        ctx.set_materialize_grads(False)  # the model's last sum h is not used elsewhere, so it has no gradient
        ops, largest = torch.ops.gptlite, None
        inputs = x, x_bias, residual, weight, bias, eps, p, seed, site, sample_ids, first, rms
        if ctx.amax:
            y, h, mean, rstd, largest = ops.residual_norm_amax(*inputs)
        else:
            y, h, mean, rstd = ops.residual_norm(*inputs)
        ctx.save_for_backward(h, weight, None if rms else mean, rstd, site, sample_ids)
        return noted(y, largest), h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None):
        h, weight, mean, rstd, site, sample_ids = ctx.saved_tensors
        dy = torch.zeros_like(h) if dy is None else dy
        p, seed, first = ctx.key
        has_x_bias, _, has_bias = ctx.has
        inputs = dy, dh, h, weight, mean, rstd, has_x_bias, has_bias, p, seed, site, sample_ids, first
        largest, ops = None, torch.ops.gptlite
        if ctx.amax:
            dx, dresidual, *grads, largest = ops.residual_norm_amax_backward(*inputs)
        else:
            dx, dresidual, *grads = ops.residual_norm_backward(*inputs)
        dx = noted(dx if p > 0.0 and site is not None else dresidual, largest)
        dx_bias, dweight, dbias = (grad if has else None for grad, has in zip(grads, ctx.has, strict=True))
        return dx, dx_bias, dresidual, dweight, dbias, None, None
