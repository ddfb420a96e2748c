"""Absolute maximum (amax) of a tensor, which its scale in fp8 needs.

The kernel that writes a tensor also finds its amax, which saves a read of the tensor. The amax travels with the tensor,
from the op that wrote it to the one that quantizes it, in the forward and in the backward pass.
"""

import torch
from torch import Tensor

from gptlite.torch_private.ops import version_of


def noted(x: Tensor, amax: Tensor | None) -> Tensor:
    """Return x, with its amax, an fp32 scalar, noted on it. Views and copies of x do not have the note."""
    if amax is not None:
        x.noted_amax = amax, version_of(x)  # type: ignore[attr-defined]
    return x


def amax_of(x: Tensor) -> Tensor:
    """Return the amax of x: the noted one, unless x has been written to since, or a reduction of x."""
    # The compiler does not trace notes. `noting` is false for it, too.
    amax, version = (None, 0) if torch.compiler.is_compiling() else getattr(x, "noted_amax", (None, 0))
    if amax is not None and version == version_of(x):
        return amax
    # One reduction. Compiled for all shapes, inductor's reduction ran on one multiprocessor of an H200.
    return torch.linalg.vector_norm(x.detach(), torch.inf).float()


def noting(wanted: bool) -> bool:
    """Return True if ops note the amax of what they write: if `wanted`, and not in compiled code."""
    return wanted and not torch.compiler.is_compiling()
