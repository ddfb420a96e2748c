"""16-bit copies of fp32 weights, which a forward pass uses instead of casting the weights each time.

AdamW's kernel writes a copy with its weight. A copy counts as long as its weight has the version of that moment: what
else writes the weight (initial values, a checkpoint, a test) makes the copy stale, and nothing needs to be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


@dataclass
class WeightCopy:
    """`values` are what the weight was rounded to when its version was `version`."""

    values: Tensor
    version: int = -1


def keep_copies(part: nn.Module, dtypes: Mapping[Any, torch.dtype]) -> None:
    """Gives these of a part's parameters, which have their memory, copies of a dtype. Those that are stale are written
    together before each forward pass of the part."""
    for parameter, dtype in dtypes.items():
        parameter.weight_copy = WeightCopy(torch.empty_like(parameter, dtype=dtype, requires_grad=False))  # type: ignore[attr-defined]
    parameters = list(dtypes)
    part.register_forward_pre_hook(lambda *_: refresh(parameters))


@torch.no_grad()
def refresh(parameters: Iterable[Tensor]) -> None:
    """Writes the copies that are stale."""
    stale = [each for each in parameters if copy_of(each) is None]
    if stale:
        copies: list[WeightCopy] = [each.weight_copy for each in stale]  # type: ignore[attr-defined]
        torch._foreach_copy_([copy.values for copy in copies], stale)  # pyright: ignore[reportPrivateImportUsage]
        mark_written(stale)


def mark_written(parameters: Iterable[Tensor]) -> None:
    """Notes that the copies are what their parameters are rounded to now."""
    for parameter in parameters:
        copy: WeightCopy = parameter.weight_copy  # type: ignore[attr-defined]
        copy.version = parameter._version


def copy_of(parameter: Tensor) -> Tensor | None:
    """A parameter's copy, if it has one that is not stale."""
    copy: WeightCopy | None = getattr(parameter, "weight_copy", None)
    return None if copy is None or copy.version != parameter._version else copy.values


def as_dtype(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in a dtype: its copy, where that serves, else cast. The gradient comes back in the weight's dtype."""
    copy = copy_of(weight)
    if copy is None or copy.dtype != dtype:
        return weight.to(dtype)
    return _Copy.apply(weight, copy)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return copy.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):
        return gradient.to(ctx.dtype), None
