"""What ranks do for the fuzz: the steps of one process, written to a file, and those of a layout, compared with it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from gptlite.config.schema import Config
from gptlite.models.registry import spec_of
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.precision import resolve_precision
from gptlite.satellites.parity.compare import (
    Distances,
    StepComparison,
    Tolerances,
    compare,
    distances,
    fp32_limits,
    half_limits,
)
from gptlite.satellites.parity.record import StepRecord, recorded
from gptlite.satellites.parity.report import verdict

ROUTED = Tolerances(1e-3, 2e-2, lambda _: 0.3, lambda _: 1.0)  # lower bounds of the limits of experts in 16 bits


def write_reference(config: Config, exact: Config | None, steps: int, path: str) -> None:
    """Write the first steps of one process to a file and, in 16-bit precision, how far they are from fp32.

    `exact` is the run in fp32; None if `config` is.
    """
    reference = [step for step in recorded(config, steps) if step is not None]
    apart = None
    if exact is not None:
        precise = [step for step in recorded(exact, steps) if step is not None]
        apart = [_by_shape(distances(*both, rms=True), both[1]) for both in zip(reference, precise, strict=True)]
    Path(path).write_bytes(pickle.dumps((reference, apart)))


def _by_shape(apart: Distances, step: StepRecord) -> Distances:
    """Return the distances with those of a tensor raised to the largest of any tensor of its shape.

    By chance, a tensor of a few elements, such as the norm of a head of 4, is three times closer to fp32 in one layer
    than in another, and `half_limits` would hold a layout to that.
    """
    shapes = {name: whole.value.shape for name, whole in step.gradients.items()}

    def raised(errors: dict[str, float]) -> dict[str, float]:
        most: dict[Any, float] = {}
        for name, error in errors.items():
            most[shapes[name]] = max(error, most.get(shapes[name], 0.0))
        return {name: most[shapes[name]] for name in errors}

    return replace(apart, gradients=raised(apart.gradients), values=raised(apart.values))


def compare_layout(config: Config, reference: str) -> tuple[bool, str, dict[str, Any]] | None:
    """Take the reference's steps on a layout. Collective. On rank 0, return whether all tensors agree within parity's
    limits, the verdict, and the largest errors; None on others."""
    mesh = build_mesh(config.parallelism)
    try:
        expected, apart = _read(reference)
        limits = fp32_limits() if apart is None else _half_limits(config, mesh, apart)
        comparisons = [
            compare(step, other, limits)
            for step, other in zip(recorded(config, len(expected), mesh), expected, strict=True)
            if step is not None
        ]
    finally:
        mesh.close()
    if not mesh.is_main:
        return None
    same, message = verdict(comparisons, limits)
    return same, message.splitlines()[0], largest_errors(comparisons)


def _half_limits(config: Config, mesh: Mesh, apart: list[Distances]) -> Tolerances:
    """Return the limits of a 16-bit run. In a model with experts, they allow for tokens that rounding routes to another
    expert: one in a hundred changes that expert's gradient by a tenth."""
    limits = half_limits(apart, torch.finfo(resolve_precision(config.precision, mesh.device).compute_dtype).eps)
    if spec_of(config.model).experts(config.model) is None:
        return limits
    return Tolerances(
        max(limits.loss, ROUTED.loss),
        max(limits.grad_norm, ROUTED.grad_norm),
        lambda name: max(limits.gradient(name), ROUTED.gradient(name)),
        lambda name: max(limits.value(name), ROUTED.value(name)),
        rms=True,
    )


def largest_errors(comparisons: Sequence[StepComparison]) -> dict[str, Any]:
    """Return the largest error of each kind over all steps, those of tensors with the tensor's name."""
    steps = [each.distances for each in comparisons]
    return {
        "loss": max(step.loss for step in steps),
        "grad_norm": max(step.grad_norm for step in steps),
        "gradient": _largest([step.gradients for step in steps]),
        "value": _largest([step.values for step in steps]),
    }


def _largest(steps: list[dict[str, float]]) -> tuple[float, str]:
    return max((error, name) for errors in steps for name, error in errors.items())


@lru_cache(maxsize=2)
def _read(path: str) -> tuple[list[StepRecord], list[Distances] | None]:
    return pickle.loads(Path(path).read_bytes())
