"""Distances between two recorded steps, and the limits that they must not exceed.

Losses and gradient norms are compared by their relative error, a gradient by |g - g'| / |g'|, and updated parameter
values by their difference in units of the step's learning rate. In its first steps, Adam changes a value by about one
learning rate, whatever the gradient, so 0.1 is a tenth of a step. In 16-bit precision, an element whose gradient is
only rounding error, such as attention's key bias, moves in a random direction: its gradient is compared, but not its
value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from gptlite.satellites.parity.gather import Box, Whole
from gptlite.satellites.parity.record import StepRecord

BUFFERS = 1e-4  # limit of the relative error of buffers in fp32, such as running statistics and expert loads
# A gradient below this fraction of its tensor's root mean square is rounding error. In bf16 key biases stay below
# 1.1e-4, while the median of query biases is 5e-3.
ROUNDING = 2**-12


@dataclass(frozen=True)
class Distances:
    """Distances of one step from the same step of the reference; inf or NaN if a tensor is missing or not finite."""

    loss: float  # relative
    grad_norm: float  # relative
    gradients: dict[str, float]  # |g - g'| / |g'|, by name
    values: dict[str, float]  # |p - p'| / learning rate, by name: maximum or (rms) root mean square of the elements


@dataclass(frozen=True)
class Tolerances:
    """Largest distances that are accepted. `rms`: values are compared by the root mean square, not the maximum, and
    without elements whose gradient is only rounding error.

    `first`: limits for the first step, which both runs begin with the same weights; None if the same limits apply.
    """

    loss: float
    grad_norm: float
    gradient: Callable[[str], float]
    value: Callable[[str], float]
    rms: bool = False
    first: Tolerances | None = None

    def at(self, step: int) -> Tolerances:
        """Return the limits of a step, counted from 1."""
        return self.first if self.first is not None and step == 1 else self


NO_DIFFERENCE = Tolerances(0.0, 0.0, lambda _: 0.0, lambda _: 0.0)  # of parallelism.deterministic=true


@dataclass(frozen=True)
class TensorDifference:
    """Distance beyond its limit. `what` is loss, gradient norm, gradient, value or buffer. If the ranks' copies of a
    gradient differ, it is `copy of the gradient`; if they report different losses, `reported loss`."""

    step: int
    what: str
    name: str  # of the tensor, or empty
    error: float
    limit: float
    where: str = ""

    def __str__(self) -> str:
        text = f"step {self.step}: {self.what}{' of ' + self.name if self.name else ''} is off by {self.error:.1e}"
        return f"{text} (limit {self.limit:.1e}){', ' + self.where if self.where else ''}"


@dataclass(frozen=True)
class StepComparison:
    """Comparison of the same step of both runs. `differences` has those beyond a limit, in the order of the model. It
    holds no tensors."""

    step: int
    loss: tuple[float, float]  # of the reference, and of the other run
    grad_norm: tuple[float, float]
    distances: Distances
    differences: list[TensorDifference]


def fp32_limits() -> Tolerances:
    """Return limits for fp32 runs that differ only in the order of summation."""
    return Tolerances(1e-5, 1e-5, lambda _: 1e-4, lambda _: 0.1)


def half_limits(apart: Sequence[Distances], epsilon: float) -> Tolerances:
    """Return limits for a 16-bit run, derived from `apart`: the distances (rms) of a single 16-bit process from an fp32
    process, one per step.

    By the triangle inequality, if a layout is as close to fp32 as the single process, its distance from the single
    process is at most twice as large. So in the first step, the limit of a gradient is twice the single process's
    distance. In later steps the weights differ too, since Adam amplifies the rounding errors of tiny gradients, by an
    amount that is random for the single process as well: the limit is four times that process's largest distance. A
    bias of a few elements may be close to fp32 by chance, so the limit of a gradient is at least the median limit.

    Losses and gradient norms may always be off by a fraction of `epsilon`, the dtype's machine epsilon (2^-7 for bf16,
    2^-10 for fp16): 3e-5 and 2e-3 in bf16. Values may always be off by 0.6 of a learning rate, as if Adam had moved one
    element in eleven in the wrong direction; a missing update is off by 0.7 or more.
    """
    return replace(_around(apart, 4.0, epsilon), first=_around(apart[:1], 2.0, epsilon))


def _around(apart: Sequence[Distances], factor: float, epsilon: float) -> Tolerances:
    """Return limits from the largest distances in `apart`: `factor` times those of gradients, twice those of others."""
    gradients = {name: factor * max(each.gradients[name] for each in apart) for name in apart[0].gradients}
    values = {name: 2 * max(each.values[name] for each in apart) for name in apart[0].values}
    middle = median(gradients.values())
    return Tolerances(
        max(epsilon / 256, 2 * max(each.loss for each in apart)),
        max(epsilon / 4, 2 * max(each.grad_norm for each in apart)),
        lambda name: max(middle, gradients.get(name, 0.0)),
        lambda name: max(0.6, values.get(name, 0.0)),
        rms=True,
    )


def distances(step: StepRecord, reference: StepRecord, rms: bool = False) -> Distances:
    """Return the distances of a step from the same step of the reference; `rms` as in Tolerances."""
    if rms:
        values = _each(_root_mean_square, step.values, reference.values, reference.gradients)
    else:
        values = _each(_largest, step.values, reference.values)
    return Distances(
        _ratio(abs(step.loss - reference.loss), abs(reference.loss)),
        _ratio(abs(step.grad_norm - reference.grad_norm), reference.grad_norm),
        _each(_relative_norm, step.gradients, reference.gradients),
        {name: _ratio(value, reference.lr) for name, value in values.items()},
    )


def compare(step: StepRecord, reference: StepRecord, limits: Tolerances) -> StepComparison:
    """Compare every tensor and scalar of a step with the reference's."""
    limits = limits.at(step.step)
    found = distances(step, reference, limits.rms)
    losses, norms = (reference.loss, step.loss), (reference.grad_norm, step.grad_norm)
    return StepComparison(step.step, losses, norms, found, list(_judged(step, reference, found, limits)))


def _judged(
    step: StepRecord, reference: StepRecord, errors: Distances, limits: Tolerances
) -> Iterator[TensorDifference]:
    def tensors(what: str, kind: str, limit: Callable[[str], float]) -> Iterator[TensorDifference]:
        ours, theirs = getattr(step, kind), getattr(reference, kind)
        for name, error in getattr(errors, kind).items():
            if not error <= limit(name):  # also true for NaN
                yield TensorDifference(
                    step.step, what, name, error, limit(name), _where(ours.get(name), theirs.get(name))
                )

    yield from tensors("gradient", "gradients", limits.gradient)
    for what, error, limit in (
        ("loss", errors.loss, limits.loss),
        ("gradient norm", errors.grad_norm, limits.grad_norm),
    ):
        if not error <= limit:
            yield TensorDifference(step.step, what, "", error, limit)
    yield from tensors("value", "values", limits.value)
    if not limits.rms:  # in 16-bit precision, rounding may route a token to another expert, and so change its load
        for name, error in _each(_relative_norm, step.buffers, reference.buffers).items():
            if not error <= BUFFERS:
                where = _where(step.buffers.get(name), reference.buffers.get(name))
                yield TensorDifference(step.step, "buffer", name, error, BUFFERS, where)
    yield from _copies(step)


def _copies(step: StepRecord) -> Iterator[TensorDifference]:
    """Yield differences between the copies of a tensor on several ranks. Copies must be bit-identical, or they would
    drift apart."""
    kinds = (("gradient", step.gradients), ("value", step.values), ("buffer", step.buffers))
    for what, wholes in ((f"copy of the {kind}", wholes) for kind, wholes in kinds):
        for name, whole in wholes.items():
            for each in whole.disagreements:
                ranks = f"ranks {each.ranks[0]} and {each.ranks[1]} differ in {_rows(each.box, whole.value)}"
                yield TensorDifference(step.step, what, name, each.error, 0.0, ranks)
    for rank, report in enumerate(step.reports):
        for what, value, first in zip(("loss", "gradient norm", "rate"), report, step.reports[0], strict=True):
            if value != first:
                yield TensorDifference(
                    step.step, f"reported {what}", "", abs(value - first), 0.0, f"rank {rank} and rank 0"
                )


def _where(whole: Whole | None, reference: Whole | None) -> str:
    """Describe the differing rows and the ranks that hold them, if the tensor is sharded and only some of its shards
    differ."""
    if whole is None or reference is None:
        return "only one of the two runs has it"
    if whole.value.shape != reference.value.shape:
        return f"its shape is {tuple(whole.value.shape)}, the reference's {tuple(reference.value.shape)}"
    if whole.value.isnan().any():
        return "some elements are held by no rank, or are NaN"
    error = (whole.value - reference.value).abs()
    norms = {
        box: torch.linalg.vector_norm(part).item() for box in whole.holders if (part := error[_slices(box)]).numel()
    }
    if len(norms) < 2:
        return ""
    box = max(norms, key=lambda box: norms[box])
    off = sum(norm > 0.1 * norms[box] for norm in norms.values())
    ranks = f"rank{'s' if len(whole.holders[box]) > 1 else ''} {', '.join(map(str, whole.holders[box]))}"
    return f"in {off} of {len(norms)} shards, most in {_rows(box, whole.value)} on {ranks}"


def _rows(box: Box, whole: Tensor) -> str:
    cut = [
        f"{name} {start} to {stop - 1}"
        for name, (start, stop), size in zip(("rows", "columns"), box, whole.shape, strict=False)
        if (start, stop) != (0, size)
    ]
    return " of ".join(cut) or "all of it"


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _each(measure: Callable[..., float], ours: dict[str, Whole], *theirs: dict[str, Whole]) -> dict[str, float]:
    """Return the measure of every tensor of either run, in the reference's order. It is inf if a tensor is missing in
    one of the runs, or has another shape."""
    result = {}
    for name in [*theirs[0], *(ours.keys() - theirs[0].keys())]:
        tensors = [wholes[name].value for wholes in (ours, *theirs) if name in wholes]
        same = len(tensors) == 1 + len(theirs) and len({tensor.shape for tensor in tensors}) == 1
        result[name] = measure(*tensors) if same else math.inf
    return result


def _ratio(part: float, whole: float) -> float:
    return 0.0 if part == 0 else part / whole if whole else math.inf


def _norm(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).item()


def _relative_norm(ours: Tensor, theirs: Tensor) -> float:
    return _ratio(_norm(ours - theirs), _norm(theirs))


def _largest(ours: Tensor, theirs: Tensor) -> float:
    return (ours - theirs).abs().max().item() if ours.numel() else 0.0


def _root_mean_square(ours: Tensor, theirs: Tensor, gradient: Tensor) -> float:
    """Return the root mean square of the difference over all elements, except those whose gradient is only rounding
    error."""
    rounding = (gradient != 0) & (gradient.abs() < ROUNDING * _norm(gradient) / math.sqrt(max(gradient.numel(), 1)))
    apart = (ours - theirs)[~rounding]
    return _norm(apart) / math.sqrt(max(apart.numel(), 1))
