"""Layer norm over the last dimension."""

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, arXiv:1607.06450. x [..., D]; weight, bias [D]."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)
