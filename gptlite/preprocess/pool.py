"""Work for many processes, whose results come in order and whose memory is bounded."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

_AHEAD = 3  # jobs for each worker that are read, done or waiting for an earlier one

_work: Callable[[Any], Any] | None = None  # of this process, once `_begin` has made it


class WorkerDied(Exception):
    """A worker ended by itself, most likely killed for its memory."""


class Pool:
    """`workers` processes that each call `make(*arguments)` once and what it returns for every job; 0: this process.

    A context manager: its processes end with it, and by themselves if this process is killed.
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
        """Each job with its result, in the order of the jobs. Raises WorkerDied, and what the work raises."""
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
            raise WorkerDied("a worker ended by itself, most likely for lack of memory") from error

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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends its children
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
