"""Python's garbage collector during a run: never within a step, but between two steps at an interval."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from gptlite.trainer.observers import Observer, due

if TYPE_CHECKING:
    from gptlite.trainer.state import TrainState

FREEZES = 2  # before the first step, and after it: torch.compile leaves 120,000 objects and more


class GarbageCollection(Observer):
    """Collections of garbage before the first two steps, then every `interval` steps. Automatic ones are off until the
    run ends. With an interval of 0, Python collects when it chooses.

    A collection takes longer the more objects Python tracks. Therefore, what exists after each of the first two is
    frozen, as it lives as long as the run. If objects are frozen already, none are frozen here, because Python can
    unfreeze only all of them. The collector's state is restored however the run ends.
    """

    def __init__(self, interval: int) -> None:
        self._interval, self._calls = interval, 0
        self._enabled = self._freezes = False

    def before(self, state: TrainState) -> None:
        """Collect if it is due."""
        if self._interval == 0:
            return
        if self._calls == 0:
            self._enabled, self._freezes = gc.isenabled(), gc.get_freeze_count() == 0
            gc.disable()
        if self._calls < FREEZES or due(state.step, self._interval):
            gc.collect()
        if self._calls < FREEZES and self._freezes:
            gc.freeze()
        self._calls += 1

    def close(self) -> None:
        """Restore the collector's state."""
        if self._freezes:
            gc.unfreeze()
        if self._enabled:
            gc.enable()
        self._enabled = self._freezes = False
