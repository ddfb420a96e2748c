"""Pipelined steps: a result is read after the next step has been enqueued, so that a GPU never waits for the host."""

from collections import deque
from collections.abc import Callable

import torch
from torch.optim import Optimizer

from gptlite.optimizer.fused import decides_on_device
from gptlite.trainer.decisions import Decisions
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Step, StepResult


def lag_of(optimizer: Optimizer, device: torch.device, wanted: int | None = None) -> int:
    """Return the number of steps by which the host runs ahead of the results, by default one on a GPU.

    It is 0 if the optimizer cannot skip a step by an on-device decision; the host then waits before each update.
    """
    lag = int(device.type == "cuda") if wanted is None else wanted
    return lag if decides_on_device(optimizer, device) else 0


class Steps:
    """Queue of steps that have begun and whose results are unread: at most `lag`, if `ready` is checked after each."""

    def __init__(self, step: Step, lag: int) -> None:
        self._step, self.lag = step, lag
        self._begun: deque[Callable[[], StepResult]] = deque()
        self._decisions: Decisions | None = None

    @property
    def waiting(self) -> bool:
        """True if there are unread results."""
        return bool(self._begun)

    def begin(self, state: TrainState) -> None:
        """Begin a step, see Step.begin."""
        if self.lag and not self._begun:  # the host's loss scale is current, so the device continues from it
            self._decisions = Decisions(state.scaler, self._step.mesh.device)
        self._begun.append(self._step.begin(state, decisions=self._decisions))

    def ready(self, everything: bool) -> bool:
        """Return True if a result is to be read: more than `lag` are unread or, with `everything`, any is."""
        return len(self._begun) > (0 if everything else self.lag)

    def take(self) -> StepResult:
        """Return the next result in step order. If it raises, such as Diverged, later steps are dropped."""
        try:
            return self._begun.popleft()()
        except BaseException:  # Ctrl-C too
            self.forget()
            raise

    def forget(self) -> None:
        """Drop all unread steps, since the state is restored to before them."""
        self._begun.clear()
