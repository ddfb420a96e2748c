"""Time limit of a run."""

import math
import time


class Clock:
    """Time limit `trainer.max_time`, with time for a save at the end.

    With a `lag`, the decision to stop reaches all ranks one step late, when up to two more steps are in progress.
    """

    def __init__(self, minutes: float | None, started: float, save_seconds: float, lag: int = 0) -> None:
        self.deadline = math.inf if minutes is None else started + 60 * minutes
        self.save_seconds, self._steps = save_seconds, 1.5 + 3 * lag
        self._step_seconds = 0.0
        self._mark = time.monotonic()

    def step(self) -> None:
        """Record the end of a step. A slower step raises the estimate at once, and faster steps lower it gradually."""
        now = time.monotonic()
        # A decaying maximum instead of a mean, since a low estimate could exceed the deadline.
        self._step_seconds, self._mark = max(0.9 * self._step_seconds, now - self._mark), now

    def mark(self) -> None:
        """Exclude the time since the last step from the duration of the next one."""
        self._mark = time.monotonic()

    def over(self) -> bool:
        """Return True if one more step and a save could exceed the deadline."""
        # Twice the duration of a save, as the next save may be slower than all before.
        return time.monotonic() + self._steps * self._step_seconds + 2 * self.save_seconds > self.deadline
