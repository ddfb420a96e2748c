"""Background thread for one save, with a time limit."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress

NICENESS = 10  # the thread gets about a tenth of a core that training also uses


class Background:
    """Action that runs in a thread of its own, which the constructor starts.

    `name` describes the action in the error raised if the action takes longer than `limit` seconds. With `yielding`,
    the thread has a low priority, for training that computes on the same cores.
    """

    def __init__(self, action: Callable[[], None], name: str, limit: float, *, yielding: bool) -> None:
        self._action, self._name, self._limit, self._yielding = action, name, limit, yielding
        self._end, self._outcome = time.monotonic() + limit, Future[None]()
        # A daemon thread, so that a file system that hangs does not keep the process alive.
        threading.Thread(target=self._run, name="checkpoint", daemon=True).start()

    @property
    def failed(self) -> bool:
        """True if `result` would raise: the action has raised, or its time limit has passed."""
        return time.monotonic() >= self._end if self.running else self._outcome.exception() is not None

    @property
    def running(self) -> bool:
        """True while the action has not ended."""
        return not self._outcome.done()

    def result(self) -> None:
        """Wait until the action ends, and raise its exception, if any. Raises TimeoutError after the time limit."""
        # Not Future.result(timeout), since the action itself may raise a TimeoutError.
        wait([self._outcome], max(0.0, self._end - time.monotonic()))
        if self.running:
            raise TimeoutError(
                f"{self._name} was not written within checkpoint.timeout_seconds={self._limit:g}: "
                "its file system hangs or is slow; check it, or raise the limit"
            )
        self._outcome.result()

    def _run(self) -> None:
        if self._yielding:
            with suppress(AttributeError, OSError):  # on Linux, threads have separate priorities
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._outcome.set_result(self._action())
        except BaseException as error:
            self._outcome.set_exception(error)
