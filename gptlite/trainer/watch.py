"""The training loop's view of a watchdog over its ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol


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
