"""Base classes and helpers of the optimizers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gptlite.parallelism.boxes import local_tensor

Closure = Callable[[], float]  # torch's optional argument of `step`, which recomputes the loss


@dataclass(frozen=True)
class BuildContext:
    """Arguments of a rule module's `build`, besides the configuration. `kernels` are the options that
    select torch's fastest optimizer kernels, `stacked` is the model's `Matrices.fused`. See `build_optimizer` for
    `fused_adam` and `dtype`."""

    groups: list[dict[str, Any]]
    fused_adam: bool
    kernels: dict[str, Any]
    stacked: Mapping[str, tuple[int, tuple[int, ...]]]
    dtype: torch.dtype


class OwnOptimizer(Optimizer):
    """Base class of optimizers for plain tensors and DTensors. They compute on local shards and communicate as needed.

    A step is collective over the ranks of the parameters' meshes. With 16-bit gradients and parameters, all computation
    is in their dtype.
    """

    param_groups: list[dict[str, Any]]
    scales_gradients = False  # True if `step` takes a factor for the gradients, as FusedStep's does
    skips_on_device = False  # True if `step` changes nothing if the tensor in the attribute `found_inf` is not 0

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return one parameter's state before its first step. Moments are sharded like the parameter."""
        raise NotImplementedError

    def update(self) -> None:
        """Take a step."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:  # type: ignore[override]
        """Take a step. Raises ValueError for a closure."""
        refuse(closure)
        self.update()

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return one parameter's state. Creates it if missing."""
        state = self.state[parameter]
        if not state:
            state.update(self.new_state(parameter))
        return state

    def stored(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return one parameter's state in checkpoint form: live tensors, or copies if a subclass overrides `take`."""
        return self.state_of(parameter)

    def take(self, parameter: Tensor, stored: dict[str, Tensor]) -> None:
        """Copy tensors from `stored` back into the state. Call this after writing into them."""

    def ready(self, group: dict[str, Any]) -> list[nn.Parameter]:
        """Return the group's parameters that have a gradient."""
        return [parameter for parameter in group["params"] if parameter.grad is not None]

    def counted(self, parameters: Iterable[Tensor]) -> list[int]:
        """Increment each parameter's step count, kept on the host, and return the counts. The first step is 1."""
        steps = [self.state_of(parameter)["step"] for parameter in parameters]
        for step in steps:
            step += 1  # in place: `step` is the state's tensor
        return [int(step) for step in steps]

    def local_states(self, parameters: Iterable[Tensor], key: str) -> list[Tensor]:
        """Return this rank's shard of the state tensor `key` of each parameter."""
        return [local_tensor(self.state_of(parameter)[key]) for parameter in parameters]


class PiecewiseOptimizer(Optimizer):
    """Base class of optimizers that apply the rule of another optimizer to pieces of its parameters.

    Both share the parameter groups and the state. The rule must be elementwise. A step reads `found_inf` on the host.
    """

    param_groups: list[dict[str, Any]]
    scales_gradients = False  # as OwnOptimizer's

    def __init__(self, rule: Optimizer) -> None:
        super().__init__(rule.param_groups, rule.defaults)
        self.rule, self.param_groups, self.state = rule, rule.param_groups, rule.state

    def update(self, options: dict[str, Any]) -> None:
        """Take a step. `options` are passed to the rule's step of each piece."""
        raise NotImplementedError

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Closure | None = None, *, scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        """Take a step, with the arguments of FusedStep.step. Raises ValueError for a closure."""
        refuse(closure)
        if found_inf is None or found_inf.item() == 0:
            self.update({} if scale is None else {"scale": scale})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Raise NotImplementedError: torch would round the state to the parameters' dtype, and replace tensors that the
        rule and the files hold. Write into the tensors of `optimizer_state` (gptlite.optimizer.state) instead."""
        raise NotImplementedError("write into the tensors of gptlite.optimizer.state.optimizer_state instead")

    def step_pieces(
        self, groups: list[dict[str, Any]], state: dict[Tensor, dict[str, Any]], options: dict[str, Any]
    ) -> None:
        """Step the tensors of the groups by the rule, without keeping references. The groups' `names` are not used."""
        rule = self.rule
        rule.param_groups = [{key: value for key, value in group.items() if key != "names"} for group in groups]
        rule.state = defaultdict(dict, state)
        try:
            rule.step(**options)
        finally:
            rule.param_groups, rule.state = self.param_groups, self.state


def rule_of(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer whose rule a piecewise optimizer applies, and any other optimizer itself."""
    return optimizer.rule if isinstance(optimizer, PiecewiseOptimizer) else optimizer


def refuse(closure: object) -> None:
    """Raise ValueError for a closure. torch's interface allows one, but here gradients are computed before the step."""
    if closure is not None:
        raise ValueError("step takes no closure")


def local_parameters(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's shard of each parameter, for writing. Increments the parameters' versions, by which autograd
    detects stale saved tensors."""
    parameters = list(parameters)
    torch.autograd.graph.increment_version(parameters)
    return [local_tensor(parameter).detach() for parameter in parameters]


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return this rank's shard of the gradient of each parameter that has one."""
    return [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]


def adam_state(parameter: Tensor) -> dict[str, Tensor]:
    """Return Adam's state before the first step, in the parameter's dtype and sharded like the parameter."""
    return {"step": step_count(), **{key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}}


def step_count() -> Tensor:
    """Return a step count of 0, a scalar fp32 tensor on the host."""
    return torch.zeros((), dtype=torch.float32)
