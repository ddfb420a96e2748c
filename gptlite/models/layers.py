"""Basic layers that cast their parameters to their input's dtype.

Parameters are fp32 master weights; activations have the compute dtype. The casts give a single device the numerics of
FSDP2's mixed precision (cast, compute, gradient back to fp32), and do nothing if FSDP2 has already cast. On a GPU,
norms by our kernel read their parameters uncast. If activations stay in fp32 (Apex's O1), a layer's `matmul_dtype` is
the dtype of its GEMM.
"""

from typing import Any

import torch
from torch import Tensor, nn

from gptlite.ops.config import CrossEntropy
from gptlite.ops.cross_entropy import (
    NOTHING_KNOWN,
    HeadGemms,
    LossGradient,
    LossTerms,
    linear_cross_entropy,
    soft_capped,
)
from gptlite.ops.dropout import DropoutKey, dropout
from gptlite.ops.layer_norm import NormParameters, biased, normed, residual_norm
from gptlite.ops.linear import cast, linear
from gptlite.ops.weight_copies import as_dtype


class Linear(nn.Linear):
    """Linear layer: x [..., in] -> [..., out], computed in `matmul_dtype` if set, otherwise in x's dtype. With `fp8`,
    its GEMMs run in fp8."""

    matmul_dtype: torch.dtype | None = None
    fp8 = False

    def __init__(self, inputs: int, outputs: int, *, bias: bool, fused: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x, self.bias)

    def project(self, x: Tensor) -> Tensor:
        """Return the output without the bias, which a later op adds."""
        return self._product(x, None)

    def without_bias_gradient(self, x: Tensor) -> Tensor:
        """Return the output. A later op computes the bias's gradient."""
        bias = cast(self.bias, x.dtype)
        return self._product(x, None if bias is None else bias.detach())

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x.to(self.matmul_dtype or x.dtype)
        if self.fp8:
            from gptlite.ops.fp8 import fp8_linear

            return fp8_linear(x, self.weight, cast(bias, x.dtype), self.fused)
        return linear(x, self.weight, bias, self.fused)

    def local_bias(self) -> Tensor | None:
        """Return the bias; None without a bias."""
        return self.bias


class Head(nn.Linear):
    """Output projection and loss; `matmul_dtype` as in Linear. Only in training mode, the loss includes the z-loss.
    With `fp8`, the loss's GEMMs run in fp8; logits that are returned do not."""

    matmul_dtype: torch.dtype | None = None
    fp8 = False

    def __init__(
        self,
        d_model: int,
        rows: int,
        cross_entropy: CrossEntropy,
        *,
        fused: bool,
        softcap: float | None = None,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__(d_model, rows, bias=False)
        self.cross_entropy, self.fused, self.terms = cross_entropy, fused, LossTerms(z_loss, softcap or 0.0)

    def forward(
        self, hidden: Tensor, targets: Tensor | None, vocab_size: int, known: LossGradient = NOTHING_KNOWN
    ) -> Tensor:
        """Return the sum of the losses, fp32; without targets, the logits [B, V] of the first position, fp32.

        hidden [B, S, d]; targets [B, S]. The weight's rows from `vocab_size` on are padding.
        """
        hidden = hidden.to(self.matmul_dtype or hidden.dtype)
        if targets is None:
            logits = (hidden[:, 0] @ as_dtype(self.weight, hidden.dtype)[:vocab_size].t()).float()
            return soft_capped(logits, self.terms.softcap)
        rows = hidden.flatten(0, 1)
        terms, gemms = self.terms.in_mode(self.training), HeadGemms(self.fused, self.fp8)
        options = {"choice": self.cross_entropy, "terms": terms, "gemms": gemms, "known": known}
        return linear_cross_entropy(rows, self.weight, targets.flatten(), vocab_size, **options)


class ResidualNorm(nn.Module):
    """Norm of the residual stream over the last dimension, in x's dtype with fp32 statistics.

    With `fp32`, it computes in fp32 with uncast parameters and rounds the result to x's dtype. With `notes_amax`, our
    kernel notes the amax of the result and of x's gradient, for fp8.
    """

    weight: Any
    bias: Any
    eps: float
    fp32 = apex = rms = fused = notes_amax = False

    def forward(self, x: Tensor) -> Tensor:
        norm = NormParameters(self.weight, self.bias, self.eps, self.rms, self.notes_amax and not self.fp32)
        return normed(x.float() if self.fp32 else x, norm, self.fused, self.apex).to(x.dtype)

    def after_residual(
        self, x: Tensor, residual: Tensor, p: float, key: DropoutKey | None, x_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of h = residual + dropout(x + x_bias), and h. Without a key, there is no dropout."""
        if self.fp32 or self.apex:  # the fused op supports one dtype, and Apex's norm has no residual addition
            h = residual + dropout(biased(x, x_bias), p, key, self.fused)
            return self(h), h
        norm = NormParameters(self.weight, self.bias, self.eps, self.rms, self.notes_amax)
        return residual_norm(x, residual, norm, p, key, self.fused, x_bias)


class LayerNorm(ResidualNorm, nn.LayerNorm):
    """Layer norm; see `layer_norm`."""

    def __init__(self, width: int, eps: float, *, bias: bool, fused: bool, apex: bool = False) -> None:
        super().__init__(width, eps, bias=bias)
        self.fused, self.apex = fused, apex


class RMSNorm(ResidualNorm):
    """RMS norm (arXiv:1910.07467).

    `gain`: the norm has a weight. `of_heads`: the norm is applied to each attention head. A tensor-parallel rank has
    only some of the heads, so the weight's gradient is summed over the ranks.
    """

    bias, rms = None, True

    def __init__(self, width: int, eps: float, *, gain: bool, fused: bool = False, of_heads: bool = False):
        super().__init__()
        self.width, self.eps, self.fused, self.of_heads = width, eps, fused, of_heads
        self.weight = nn.Parameter(torch.ones(width)) if gain else None
