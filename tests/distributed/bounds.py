"""How far a layout of the matrix may be from one process: by the rule of gptlite.parity.compare, and never further.

The rule judges each tensor by what 16 bits cost it. The bounds are about twice what any cell of a precision was found
to be off by, on any machine so far (docs/parallelism_checks.md has both): they do not grow with what one process is off
by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gptlite.parity.compare import Distances, Limits, fp32_limits, half_limits


@dataclass(frozen=True)
class Bounds:
    """The largest distances of any step of any cell."""

    loss: float  # relative
    grad_norm: float  # relative
    gradient: float  # norm of the difference / norm
    value: float  # root mean square / learning rate


STATED = {
    "bf16": Bounds(3e-5, 4e-3, 2e-1, 1.0),
    "fp16": Bounds(6e-6, 6e-4, 8e-3, 0.6),
    "amp_o1": Bounds(3e-6, 4e-4, 8e-3, 0.4),
    "amp_o2": Bounds(6e-6, 6e-4, 8e-3, 0.6),
}


def limits_of(apart: Sequence[Distances] | None, precision: str) -> Limits:
    """What a cell must keep; `apart`: how far one process in that precision is from fp32, None in fp32."""
    if apart is None:
        return fp32_limits()
    stated, dtype = STATED[precision], torch.bfloat16 if precision == "bf16" else torch.float16
    limits = half_limits(apart, torch.finfo(dtype).eps)
    return replace(_within(limits, stated), first=_within(limits.at(1), stated))


def _within(limits: Limits, stated: Bounds) -> Limits:
    return replace(
        limits,
        loss=min(limits.loss, stated.loss),
        grad_norm=min(limits.grad_norm, stated.grad_norm),
        gradient=lambda name: min(limits.gradient(name), stated.gradient),
        value=lambda name: min(limits.value(name), stated.value),
    )
