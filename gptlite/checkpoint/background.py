"""A save beside the training: one thread, and what became of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress

NICENESS = 10  # about a tenth of a core that training wants, too


class Background:
    """Runs an action in a thread at once. `name` is what it is called where it takes longer than `limit` seconds.

    `yielding`: training computes on this machine's cores, so the thread takes those only that it leaves.
    """

    def __init__(self, action: Callable[[], None], name: str, limit: float, *, yielding: bool) -> None:
        self._action, self._name, self._limit, self._yielding = action, name, limit, yielding
        self._end, self._outcome = time.monotonic() + limit, Future[None]()
        threading.Thread(target=self._run, name="checkpoint", daemon=True).start()

    @property
    def failed(self) -> bool:
        """Whether `result` would raise: the action has, or its time is over."""
        return time.monotonic() >= self._end if self.running else self._outcome.exception() is not None

    @property
    def running(self) -> bool:
        """Whether the action has not ended yet."""
        return not self._outcome.done()

    def result(self) -> None:
        """Waits for the end, and raises what the action raised; TimeoutError where it takes longer than the limit."""
        wait([self._outcome], max(0.0, self._end - time.monotonic()))
        if self.running:
            raise TimeoutError(
                f"{self._name} is not written after checkpoint.timeout_seconds={self._limit:g}: "
                "its file system hangs, or is slow; look there, or allow more"
            )
        self._outcome.result()

    def _run(self) -> None:
        if self._yielding:
            with suppress(AttributeError, OSError):  # Linux: a thread has a priority of its own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._outcome.set_result(self._action())
        except BaseException as error:
            self._outcome.set_exception(error)
