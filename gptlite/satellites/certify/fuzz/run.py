"""Functions that ranks run for the fuzz: the steps of one process, into a file, and a layout's, compared with it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from gptlite.config.saved import to_yaml
from gptlite.config.schema import Config
from gptlite.models.registry import spec_of
from gptlite.optimizer.registry import optimizer_name
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
from gptlite.satellites.parity.record import StepRecord, build, recorded
from gptlite.satellites.parity.report import verdict
from gptlite.trainer.folder import RunFolder

SMALL = 64  # elements
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
    """Return the distances with those of a tensor raised to the largest of any tensor of its shape, and those of small
    tensors to the largest of any small one.

    By chance, a tensor of a few elements, such as the norm of a head of 4, is three times closer to fp32 in one layer
    than in another, and `half_limits` would hold a layout to that.
    """
    values = {name: whole.value for name, whole in step.gradients.items()}
    shapes = {name: value.shape if value.numel() > SMALL else () for name, value in values.items()}

    def raised(errors: dict[str, float]) -> dict[str, float]:
        most: dict[Any, float] = {}
        for name, error in errors.items():
            most[shapes[name]] = max(error, most.get(shapes[name], 0.0))
        return {name: most[shapes[name]] for name in errors}

    return replace(apart, gradients=raised(apart.gradients), values=raised(apart.values))


def save_first_step(config: Config) -> str:
    """Take a step, and save a checkpoint in the run's folder. Collective. Return the checkpoint's folder."""
    mesh = build_mesh(config.parallelism)
    state, take_step = build(config, mesh)
    with closing(state.loader), closing(RunFolder(config, mesh).checkpointer) as checkpointer:
        take_step(state, lambda _: None)
        text = to_yaml(config) if mesh.is_main else ""
        folder = checkpointer.save(state.tensors(), state.meta(), text, None, lambda _: None)
    mesh.close()
    return str(folder)


def compare_layout(config: Config, reference: str, resumes: bool = False) -> tuple[bool, str, dict[str, Any]] | None:
    """Take the reference's steps on a layout. Collective. On rank 0, return whether all tensors agree within parity's
    limits, the verdict, and the largest errors; None on others. If it `resumes`, from a checkpoint of the first step,
    only the steps after it are taken."""
    mesh = build_mesh(config.parallelism)
    run = RunFolder(config, mesh) if resumes else None
    try:
        expected, apart = _read(reference)
        expected = expected[1:] if resumes else expected
        limits = _exact_limits(config) if apart is None else _half_limits(config, mesh, apart)
        restore = run.restore if run is not None else lambda _: None
        comparisons = [
            compare(step, other, limits)
            for step, other in zip(recorded(config, len(expected), mesh, restore), expected, strict=True)
            if step is not None
        ]
    finally:
        if run is not None:
            run.checkpointer.close()
        mesh.close()
    if not mesh.is_main:
        return None
    same, message = verdict(comparisons, limits)
    return same, message.splitlines()[0], largest_errors(comparisons)


def _exact_limits(config: Config) -> Tolerances:
    """Return the limits of an fp32 run. Lion updates by a sign, which rounding decides for elements whose gradient is
    0 in exact arithmetic, such as attention's key bias: they are not compared."""
    return replace(fp32_limits(), rms=optimizer_name(type(config.optimizer)) == "lion")


def _half_limits(config: Config, mesh: Mesh, apart: list[Distances]) -> Tolerances:
    """Return the limits of a 16-bit run, wider than `half_limits` of a single model.

    The loss and the gradient norm are two numbers, which one process may have close to fp32 by chance. With experts,
    the limits allow for tokens that rounding routes to another expert: one in a hundred changes that expert's gradient
    by a tenth.
    """
    epsilon = torch.finfo(resolve_precision(config.precision, mesh.device).compute_dtype).eps
    limits, routed = half_limits(apart, epsilon), spec_of(config.model).experts(config.model) is not None
    least = ROUTED if routed else Tolerances(epsilon / 64, epsilon, lambda _: 0.0, lambda _: 0.0)

    def wider(limits: Tolerances) -> Tolerances:
        return Tolerances(
            max(limits.loss, least.loss),
            max(limits.grad_norm, least.grad_norm),
            lambda name: max(limits.gradient(name), least.gradient(name)),
            lambda name: max(limits.value(name), least.value(name)),
            rms=True,
        )

    return replace(wider(limits), first=wider(limits.at(1)))


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
