"""Bias and GELU, the pointwise middle of the MLP."""

import torch.nn.functional as F
from torch import Tensor


def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """gelu(x + bias), arXiv:1606.08415. x [..., F]; bias [F]; `approximate` is "tanh" (GPT-2's) or "none" (exact)."""
    return F.gelu(x if bias is None else x + bias, approximate=approximate)
