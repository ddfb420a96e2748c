"""Text output of a comparison: a row per step, and a verdict that names the first tensor that differs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gptlite.satellites.parity.compare import StepComparison, Tolerances

HEADER = (
    f"{'step':>4}  {'loss':>9} {'on layout':>9} {'apart':>7}  {'grad norm':>9} {'on layout':>9} {'apart':>7}  "
    "worst gradient, worst updated value"
)


def row(comparison: StepComparison) -> str:
    """Return the row of a step: loss and gradient norm of the reference and of the layout, their distances, and the
    tensors with the largest errors."""
    found = comparison.distances
    numbers = (*comparison.loss, found.loss, *comparison.grad_norm, found.grad_norm)
    left = "{:9.5f} {:9.5f} {:7.1e}  {:9.5f} {:9.5f} {:7.1e}".format(*numbers)
    return f"{comparison.step:4d}  {left}  {worst(found.gradients)}, {worst(found.values)}"


def worst(errors: dict[str, float]) -> str:
    """Format the largest error, e.g. `3.1e-07 layers.0.attn.qkv.bias`. NaN counts as larger than any number."""
    name = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return f"{errors[name]:.1e} {name}"


def verdict(comparisons: Sequence[StepComparison], limits: Tolerances) -> tuple[bool, str]:
    """Return True if the runs agree within the limits, together with a message."""
    tensors = len(comparisons[0].distances.gradients)
    differences = next((each.differences for each in comparisons if each.differences), [])
    if not differences:
        return True, f"same: {len(comparisons)} steps, {tensors} tensors; {described(comparisons, limits)}"
    gradients = [each for each in differences if each.what == "gradient"]
    lines = [f"different: {differences[0]}"]
    if len(gradients) > 1:
        most = max(gradients, key=lambda each: each.error).name
        lines.append(f"in that step {len(gradients)} of {tensors} gradients differ, {most} most")
    others = [each for each in differences if each.what != "gradient"]
    return False, "\n".join([*lines, *(str(each) for each in others[:3] if each is not differences[0])])


def described(comparisons: Sequence[StepComparison], limits: Tolerances) -> str:
    """Describe the largest distances over all steps, each with a limit. For losses and gradient norms, it is the limit
    of the steps after the first; for tensors, the limit of the step with the largest distance."""
    distances = [each.distances for each in comparisons]
    gradient, value = (
        max(
            ((error, name, limits.at(each.step)) for each in comparisons for name, error in errors(each).items()),
            key=lambda found: found[0],
        )
        for errors in (lambda each: each.distances.gradients, lambda each: each.distances.values)
    )
    return (
        f"loss within {max(each.loss for each in distances):.1e} (limit {limits.loss:.1e}), "
        f"gradient norm {max(each.grad_norm for each in distances):.1e} ({limits.grad_norm:.1e}), "
        f"gradients {gradient[0]:.1e} ({gradient[2].gradient(gradient[1]):.1e}), "
        f"values {value[0]:.1e} of a learning rate ({value[2].value(value[1]):.1e})"
    )
