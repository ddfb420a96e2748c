"""A save beside the training: one thread, and what became of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

NICENESS = 10  # about a tenth of a core that training wants, too


class Background:
    """Runs an action in a thread at once. `name` is what it is called where it takes longer than `limit` seconds.

    `yielding`: training computes on this machine's cores, so the thread takes those only that it leaves.
    """

    def __init__(self, action: Callable[[], None], name: str, limit: float, *, yielding: bool) -> None:
        self._action, self._name, self._limit, self._yielding = action, name, limit, yielding
        self._began, self._error = time.monotonic(), None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether `result` would raise: the action has, or its time is over."""
        if self._thread.is_alive():
            return self._left() <= 0
        return self._error is not None

    @property
    def running(self) -> bool:
        """Whether the action has not ended yet."""
        return self._thread.is_alive()

    def result(self) -> None:
        """Waits for the end, and raises what the action raised; TimeoutError where it takes longer than the limit."""
        # In pieces, so that a signal's handler gets its turn.
        while self._thread.is_alive() and (left := self._left()) > 0:
            self._thread.join(min(left, 0.5))
        if self._thread.is_alive():
            raise TimeoutError(
                f"{self._name} is not written after checkpoint.timeout_seconds={self._limit:g}: "
                "its file system hangs, or is slow; look there, or allow more"
            )
        if self._error is not None:
            raise self._error

    def _left(self) -> float:
        return self._began + self._limit - time.monotonic()

    def _run(self) -> None:
        if self._yielding:
            with suppress(AttributeError, OSError):  # Linux: a thread has a priority of its own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._action()
        except BaseException as error:
            self._error = error
