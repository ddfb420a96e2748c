"""What the optimizers written here have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gptlite.parallelism.zero import local_tensor


@dataclass(frozen=True)
class BuildContext:
    """What a rule builds its optimizer from, beside the configuration. kernels: options of torch's optimizers that
    choose the fastest. See `build_optimizer` for `fused_adam` and `stacked`."""

    groups: list[dict[str, Any]]
    fused_adam: bool
    kernels: dict[str, Any]
    stacked: Mapping[str, tuple[int, int]]


class OwnOptimizer(Optimizer):
    """An optimizer over plain tensors and DTensors: it works on local tensors, and asks other ranks for what they have.

    A step is collective over the ranks of the parameters' meshes. Of 16-bit gradients and parameters all is computed in
    their dtype.
    """

    param_groups: list[dict[str, Any]]

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """One parameter's state before its first step; moments are cut as the parameter is."""
        raise NotImplementedError

    def update(self) -> None:
        """Takes a step."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Raises ValueError for a closure."""
        refuse(closure)
        self.update()

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """One parameter's state, made where it is missing."""
        state = self.state[parameter]
        if not state:
            state.update(self.new_state(parameter))
        return state

    def stored(self, parameter: Tensor) -> dict[str, Tensor]:
        """One parameter's state as a checkpoint has it: live, unless `take` says how to take back a copy."""
        return self.state_of(parameter)

    def take(self, parameter: Tensor, stored: dict[str, Tensor]) -> None:
        """To be called after writing into what `stored` gave."""

    def ready(self, group: dict[str, Any]) -> list[nn.Parameter]:
        """The group's parameters that have a gradient."""
        return [parameter for parameter in group["params"] if parameter.grad is not None]

    def counted(self, parameters: Iterable[Tensor]) -> list[int]:
        """Counts a step of each parameter, and gives the number of it, from 1. The counts are on the host."""
        steps = [self.state_of(parameter)["step"] for parameter in parameters]
        for step in steps:
            step += 1
        return [int(step) for step in steps]

    def local_states(self, parameters: Iterable[Tensor], key: str) -> list[Tensor]:
        """This rank's part of one state of each parameter."""
        return [local_tensor(self.state_of(parameter)[key]) for parameter in parameters]


def refuse(closure: object) -> None:
    """Raises ValueError for the closure that torch lets a step have: gradients are computed before."""
    if closure is not None:
        raise ValueError("step takes no closure")


def local_parameters(parameters: Iterable[Tensor]) -> list[Tensor]:
    """This rank's parts, about to be written: a graph that kept one of them is told."""
    parameters = list(parameters)
    torch.autograd.graph.increment_version(parameters)
    return [local_tensor(parameter).detach() for parameter in parameters]


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's part of each gradient."""
    return [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]


def step_count() -> Tensor:
    """A count of no steps yet."""
    return torch.zeros((), dtype=torch.float32)
