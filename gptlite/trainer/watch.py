"""The training loop's view of the watchdog, which runs with several ranks only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from gptlite.parallelism.mesh import Mesh


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
    """Watch of a single rank, which waits for no other."""

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


def watch_ranks(mesh: Mesh, limit: float) -> Watch:
    """Return a watch over the thread that calls this, until closed. All ranks must call it. `limit` is the time limit
    of a collective in seconds."""
    if mesh.world_size == 1:
        return Unwatched()
    from gptlite.monitor.watchdog import RankWatch

    return RankWatch(mesh, limit)
