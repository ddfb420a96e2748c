"""Short words that ranks leave for each other in the process group's store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

ANSWER_SECONDS = 2.0  # for a store that answers, thousands of times enough


class Mailbox:
    """This rank's word, written every `period` seconds; those of all, read as often while `asking`.

    A thread does it, over a connection of its own: the host of the store may have stopped, and then a call never
    returns. `answered` is when the store last did, in time.monotonic() seconds. `name` is the same on all ranks, and
    no other's; `host` is rank 0's word once there was one, for rank 0 may hold the store.
    """

    def __init__(self, store: Any, name: str, rank: int, world: int, period: float) -> None:
        self._store, self._period = store.clone(), period
        self._last, self._verdict = store.clone(), f"{name}/verdict"  # the other may be in a call that never returns
        self._keys = [f"{name}/{each}" for each in range(world)]
        self._own = self._keys[rank]
        self._word: str | None = None
        self._wake, self._closed = threading.Event(), False
        self.asking = False
        self.words: list[str | None] = []
        self.host: str | None = None
        self.answered = time.monotonic()
        self._thread = threading.Thread(target=self._work, daemon=True, name="words to other ranks")
        self._thread.start()

    def post(self, word: str) -> None:
        """Leaves a word in place of the last."""
        self._word = word
        self._wake.set()

    def close(self) -> None:
        """Writes no more. A call that is under way is waited for a moment."""
        self._closed = True
        self._wake.set()
        self._thread.join(1.0)

    def leave_verdict(self, text: str) -> None:
        """Leaves for all ranks why this one ends, unless another has."""
        self._within_time(lambda: self._last.compare_set(self._verdict, "", text))

    def verdict(self) -> str | None:
        """What a rank has left so."""
        return self._within_time(
            lambda: self._last.get(self._verdict).decode() if self._last.check([self._verdict]) else None
        )

    def _within_time(self, call: Callable[[], Any]) -> Any:
        """What a call to the store gives; None where the store does not answer."""
        answers: list[Any] = []

        def ask() -> None:
            with suppress(dist.DistError):
                answers.append(call())

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(ANSWER_SECONDS)
        return answers[0] if answers else None

    def _work(self) -> None:
        while not self._closed:
            word, self._word = self._word, None
            with suppress(dist.DistError):  # the store has gone, and the launcher with it
                if word is not None:
                    self._store.set(self._own, word)
                if self.asking:
                    self.words = self._read(self._keys)
                elif self.host is None:
                    self.host = self._read(self._keys[:1])[0]
                self.answered = time.monotonic()
            self._wake.wait(self._period)
            self._wake.clear()

    def _read(self, keys: list[str]) -> list[str | None]:
        if self._store.check(keys):
            return [answer.decode() for answer in self._store.multi_get(keys)]
        return [self._store.get(key).decode() if self._store.check([key]) else None for key in keys]
