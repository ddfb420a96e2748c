"""Process pool with ordered results and bounded memory."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

_AHEAD = 3  # jobs in flight for each worker, including results that wait for an earlier one

_work: Callable[[Any], Any] | None = None  # the function of this worker process, set by `_begin`


class WorkerDied(Exception):
    """Raised if a worker ended unexpectedly, most likely killed for lack of memory."""


class Pool:
    """Pool of `workers` processes. Each calls `make(*arguments)` once, and then the returned function for every job.

    With 0 workers, the jobs run in this process. The pool is a context manager. Its processes end with the `with`
    statement, or when this process is killed.
    """

    def __init__(self, workers: int, make: Callable[..., Callable[[Any], Any]], *arguments: Any):
        self._ahead = _AHEAD * workers
        self._before = {child.pid for child in multiprocessing.active_children()}
        if workers:
            context = multiprocessing.get_context("spawn")  # a fork would inherit threads' locks
            self._executor = ProcessPoolExecutor(workers, context, _begin, (make, arguments))
        else:
            self._here = make(*arguments)

    def map(self, jobs: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield each job with its result, in the order of `jobs`. Raises WorkerDied, and any error raised by a job."""
        if not self._ahead:
            yield from ((job, self._here(job)) for job in jobs)
            return
        waiting: deque[tuple[Any, Future[Any]]] = deque()
        try:
            for job in jobs:
                waiting.append((job, self._executor.submit(_do, job)))
                if len(waiting) >= self._ahead:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        except BrokenProcessPool as error:
            raise WorkerDied("a worker ended unexpectedly, most likely for lack of memory") from error

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if not self._ahead:
            return
        if kind is not None:
            for child in multiprocessing.active_children():
                if child.pid not in self._before:
                    child.terminate()
        self._executor.shutdown(wait=True, cancel_futures=True)


def _begin(make: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends its children
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _work = make(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _do(job: Any) -> Any:
    assert _work is not None
    return _work(job)
