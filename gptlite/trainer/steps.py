"""Queue of optimizer steps. Results are read after the next step is enqueued, so a GPU never waits for the host."""

from collections import deque
from collections.abc import Callable

import torch
from torch.optim import Optimizer

from gptlite.optimizer.fused import decides_on_device
from gptlite.trainer.loss_scale import Decisions, LossScaler
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Step, StepResult


def lag_of(
    optimizer: Optimizer, device: torch.device, wanted: int | None = None, scaler: LossScaler | None = None
) -> int:
    """Return the number of steps that the host enqueues before it reads a result: `wanted`, or by default 1 on a GPU.

    The result is 0 if the optimizer cannot skip a step by an on-device decision, and if the learning rate of a step
    depends on whether the previous one is skipped (`loss_scale_rule: deepspeed`). The host then waits before each
    update.
    """
    if scaler is not None and scaler.deepspeed:
        return 0
    lag = int(device.type == "cuda") if wanted is None else wanted
    return lag if decides_on_device(optimizer, device) else 0


class Steps:
    """Queue of steps with unread results. The queue has at most `lag` steps if results are taken while `ready`."""

    def __init__(self, step: Step, lag: int) -> None:
        self._step, self.lag = step, lag
        self._begun: deque[Callable[[], StepResult]] = deque()
        self._decisions: Decisions | None = None

    @property
    def waiting(self) -> bool:
        """True if any result is unread."""
        return bool(self._begun)

    def begin(self, state: TrainState) -> None:
        """Begin a step, see Step.begin, and add it to the queue."""
        if self.lag and self._decisions is None:
            self._decisions = Decisions(state.scaler, self._step.mesh.device)
        elif self._decisions is not None and not self._begun:
            self._decisions.restart()
        self._begun.append(self._step.begin(state, decisions=self._decisions))

    def ready(self, everything: bool) -> bool:
        """Return True if a result must be read: more than `lag` are unread or, with `everything`, at least one is."""
        return len(self._begun) > (0 if everything else self.lag)

    def take(self) -> StepResult:
        """Return the next result in step order. If it raises, for example Diverged, drops later steps."""
        try:
            return self._begun.popleft()()
        except BaseException:  # includes KeyboardInterrupt
            self.forget()
            raise

    def forget(self) -> None:
        """Drop all unread results, since the state is restored to an earlier step."""
        self._begun.clear()
