"""Facts about a tensor that the kernel which writes it also provides, kept on the tensor together with its version:
16-bit copies of fp32 weights, and the absolute maximum (amax) of activations and gradients.

They are valid as long as the tensor has this version. Any other write (initialization, a checkpoint) changes it.
AdamW's kernel writes a copy together with its weight, and a forward pass uses it instead of casting the weight each
time. The amax, which a tensor's scale in fp8 needs, travels with the tensor from the op that wrote it to the one that
quantizes it, in the forward and in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gptlite.torch_private.ops import foreach_copy_, version_of


@dataclass
class WeightCopy:
    """Copy of a weight. `values` are the weight's values at version `version`, rounded to 16 bits."""

    values: Tensor
    version: int = -1


def keep_copies(part: nn.Module, dtypes: Mapping[Any, torch.dtype]) -> None:
    """Create copies of the parameters in `dtypes`, and refresh stale ones before each forward pass of `part`."""
    for parameter, dtype in dtypes.items():
        parameter.weight_copy = WeightCopy(torch.empty_like(parameter, dtype=dtype, requires_grad=False))  # type: ignore[attr-defined]
    parameters = list(dtypes)
    part.register_forward_pre_hook(lambda *_: refresh(parameters))


@torch.no_grad()
def refresh(parameters: Iterable[Tensor]) -> None:
    """Update the copies that are stale."""
    stale = [each for each in parameters if copy_of(each) is None]
    if stale:
        copies: list[WeightCopy] = [each.weight_copy for each in stale]  # type: ignore[attr-defined]
        foreach_copy_([copy.values for copy in copies], stale)
        mark_written(stale)


def mark_written(parameters: Iterable[Tensor]) -> None:
    """Mark the copies as up to date with their parameters."""
    for parameter in parameters:
        copy: WeightCopy = parameter.weight_copy  # type: ignore[attr-defined]
        copy.version = version_of(parameter)


def copy_of(parameter: Tensor) -> Tensor | None:
    """Return a parameter's copy; None if the parameter has no copy or a stale one."""
    copy: WeightCopy | None = getattr(parameter, "weight_copy", None)
    return None if copy is None or copy.version != version_of(parameter) else copy.values


def as_dtype(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in a dtype: its copy if that is valid, otherwise a cast. The gradient has the weight's dtype."""
    copy = copy_of(weight)
    if copy is None or copy.dtype != dtype:
        return weight.to(dtype)
    return _Copy.apply(weight, copy)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return copy.detach()  # the copy itself must not become part of a graph

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):
        return gradient.to(ctx.dtype), None


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
