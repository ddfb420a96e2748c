"""Steps in order, each result handed out when the next step has been enqueued: a GPU never waits for the host."""

from collections import deque
from collections.abc import Callable

import torch
from torch.optim import Optimizer

from gptlite.optimizer.fused import decides_on_device
from gptlite.trainer.decisions import Decisions
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Step, StepResult


def lag_of(optimizer: Optimizer, device: torch.device, wanted: int | None = None) -> int:
    """How many steps the host is ahead of the results, by default one on a GPU, which computes while the host acts.

    None where the optimizer cannot be told on the device to leave a step out: the host waits before each update.
    """
    lag = int(device.type == "cuda") if wanted is None else wanted
    return lag if decides_on_device(optimizer, device) else 0


class Steps:
    """The steps that were begun, and whose results were not taken: at most `lag`, while `ready` is asked after each."""

    def __init__(self, step: Step, lag: int) -> None:
        self._step, self.lag = step, lag
        self._begun: deque[Callable[[], StepResult]] = deque()
        self._decisions: Decisions | None = None

    @property
    def waiting(self) -> bool:
        """Whether the state is ahead of the results."""
        return bool(self._begun)

    def begin(self, state: TrainState) -> None:
        """Begins a step, see Step.begin."""
        if self.lag and not self._begun:  # the host knows all: the device takes over from there
            self._decisions = Decisions(state.scaler, self._step.mesh.device)
        self._begun.append(self._step.begin(state, decisions=self._decisions))

    def ready(self, everything: bool) -> bool:
        """Whether a result is to be taken: where `everything` is to be known, until none is left."""
        return len(self._begun) > (0 if everything else self.lag)

    def take(self) -> StepResult:
        """The next result, in the order of steps. Raises Diverged, and leaves out what was begun later."""
        try:
            return self._begun.popleft()()
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Leaves out what was begun: the state is taken back to before it."""
        self._begun.clear()
