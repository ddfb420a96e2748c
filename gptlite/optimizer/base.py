"""What the optimizers written here have in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gptlite.parallelism.zero import local_tensor

Closure = Callable[[], float]  # what torch lets a step compute the loss by


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
    def step(self, closure: Closure | None = None) -> None:  # type: ignore[override]
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


class PiecewiseStep:
    """What replaces an optimizer's step by steps of pieces, and needs to know on the host whether there is one."""

    @classmethod
    def put_on(cls, optimizer: Optimizer) -> None:
        """Makes this the optimizer's step."""
        kind = type(optimizer)
        optimizer.__class__ = type(cls.__name__.removesuffix("Step") + kind.__name__, (cls, kind), {})

    def take(self, options: dict[str, Any]) -> None:
        """Takes the step, each piece's with these options of the optimizer's own step."""
        raise NotImplementedError

    def step(
        self, closure: Closure | None = None, *, scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        """As FusedStep.step."""
        refuse(closure)
        if found_inf is not None and found_inf.item() != 0:
            return
        with torch.no_grad():
            self.take({} if scale is None else {"scale": scale})

    step = Optimizer.profile_hook_step(step)  # pyright: ignore[reportArgumentType]


class PieceRule:
    """An optimizer's rule without its hooks, for tensors that are given for each step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = object.__new__(type(optimizer))
        Optimizer.__setstate__(self._optimizer, optimizer.__getstate__())
        self._hold([], {})

    def step(self, groups: list[dict[str, Any]], state: dict[Tensor, dict[str, Any]], options: dict[str, Any]) -> None:
        """Steps the groups' tensors, whose `names` it does not need, and forgets them."""
        self._hold([{key: value for key, value in group.items() if key != "names"} for group in groups], state)
        self._optimizer.step(**options)
        self._hold([], {})

    def _hold(self, groups: list[dict[str, Any]], state: dict[Tensor, dict[str, Any]]) -> None:
        self._optimizer.param_groups, self._optimizer.state = groups, defaultdict(dict, state)


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


def adam_state(parameter: Tensor) -> dict[str, Tensor]:
    """Adam's state before the first step, in the parameter's dtype and cut as it is."""
    return {"step": step_count(), **{key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}}


def step_count() -> Tensor:
    """A count of no steps yet."""
    return torch.zeros((), dtype=torch.float32)
