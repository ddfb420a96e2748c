"""Interfaces of what follows a run's steps without a part in them: its observers, and the watch over its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from gptlite.trainer.state import TrainState
    from gptlite.trainer.step import StepResult


class Observer:
    """Follower of a run's steps. A method that is not overridden does nothing.

    All ranks have the same observers, so a method may call a collective, except `figures`, `closing` and `close`.
    """

    def before(self, state: TrainState) -> None:
        """Called before a step begins."""

    def during(self, state: TrainState) -> AbstractContextManager[None]:
        """Return a context for the beginning of a step, in which its passes run."""
        return nullcontext()

    def after(self, result: StepResult) -> None:
        """Called with the result of each step, in order. The state may be one step ahead."""

    def reads(self, state: TrainState) -> bool:
        """Return True if the next step must not begin before the last step's result is read. Equal on all ranks."""
        return False

    def settled(self, state: TrainState) -> None:
        """Called between two steps when the result of the first is read, so that the state is not ahead."""

    def ended(self, state: TrainState) -> None:
        """Called after the last step, unless the run fails."""

    def close(self) -> None:
        """Release resources, before `figures` and `closing`. Called however the run ends, unless the watch ends this
        process."""

    def entries(self) -> dict[str, Any]:
        """Return entries for a row of training metrics."""
        return {}

    def figures(self) -> dict[str, Any]:
        """Return entries for result.json. May be called in another thread, when this process is about to end."""
        return {}

    def closing(self) -> list[tuple[str, str]]:
        """Return lines for the table of results as [(label, text)]. Called on rank 0 if the run has not failed."""
        return []


class Watch(Protocol):
    """Watchdog of the ranks. `ending` is called from another thread, with the error that is about to end this
    process."""

    ending: Callable[[Exception], None]

    def close(self) -> None:
        """Stop watching."""
        ...

    def step(self, number: int) -> Any:
        """Context manager for a training step, during which time in collectives is counted."""
        ...

    def verdict(self) -> str | None:
        """Return the message of the rank that exited first, which explains later failures on this rank."""
        ...

    def communication(self, step_seconds: float) -> dict[str, Any]:
        """Return entries for a metrics row on the time in collectives. All ranks must call it."""
        ...


class Unwatched:
    """No watch: a single rank waits for no other, and several need none to train."""

    def __init__(self) -> None:
        self.ending: Callable[[Exception], None] = lambda error: None

    def close(self) -> None:
        """Do nothing."""

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Context manager for a training step."""
        yield

    def verdict(self) -> None:
        """Return None."""

    def communication(self, step_seconds: float) -> dict[str, Any]:
        """Return no entries."""
        return {}


def due(step: int, interval: int) -> bool:
    """Return True at each multiple of `interval`; always False if it is 0."""
    return interval > 0 and step % interval == 0
