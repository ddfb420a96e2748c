"""A model's own metrics, such as accuracy: sums that its loss records in training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gptlite.errors import ConfigError
from gptlite.models.base import BaseSpec
from gptlite.ops.inputs import Inputs


def check_metrics(spec: BaseSpec, values: Mapping[str, Any]) -> None:
    """Raise ConfigError unless `values`, recorded by one call of the loss, has a scalar for each of the spec's
    `metrics`, and nothing else."""
    key = f"the {spec.name} model"
    if missing := [name for name in spec.metrics if name not in values]:
        raise ConfigError(f"{key}: its loss does not record {missing[0]}, declared in `metrics`, in inputs.metrics")
    if more := [name for name in values if name not in spec.metrics]:
        raise ConfigError(f"{key}: its loss records {more[0]}; add {more[0]} to the spec's `metrics`")
    for name, value in values.items():
        if not isinstance(value, Tensor | int | float) or (isinstance(value, Tensor) and value.dim()):
            words = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(f"{key}: the metric {name} is {words}; record a scalar, the sum over the samples")


def metric_values(spec: BaseSpec, found: Mapping[str, Any], device: torch.device) -> Tensor:
    """Return the recorded sums in the order of the spec's `metrics`, fp64. Raises ConfigError as check_metrics does."""
    check_metrics(spec, found)
    return torch.stack([torch.as_tensor(found[name], device=device).detach().double() for name in spec.metrics])


class Recording:
    """Forward pass that sums a step's metrics over this rank's micro-batches, on the device.

    In a pipeline, only the part with the loss records metrics. A recomputed block does not count twice, since metrics
    are read when the forward pass returns, before any recomputation.
    """

    def __init__(self, spec: BaseSpec, forward: Callable[[nn.Module, Any, Inputs], Tensor]) -> None:
        self._spec, self._forward = spec, forward
        self._sums: Tensor | None = None

    def __call__(self, part: nn.Module, x: Any, inputs: Inputs) -> Tensor:
        """Return the result of the forward pass."""
        found: dict[str, Any] = {}
        out = self._forward(part, x, replace(inputs, metrics=found))
        if not out.dim():  # a loss, not activations
            values = metric_values(self._spec, found, out.device)
            self._sums = values if self._sums is None else self._sums + values
        return out

    def take(self, device: torch.device) -> Tensor:
        """Return the sums since the last call, fp64, and reset them to zero."""
        none = torch.zeros(len(self._spec.metrics), dtype=torch.float64, device=device)
        sums, self._sums = self._sums, None
        return none if sums is None else sums
