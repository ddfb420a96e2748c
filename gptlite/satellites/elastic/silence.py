"""Loss of a rank whose connections stay open, as of a frozen node or behind a cut cable: noticed by its silence."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

LOST_SECONDS = 10.0  # silence after which a rank is lost, however long its collectives may take
PERIOD = 2.0
LOOK_SECONDS = 0.25  # also for the note of a rank that leaves
TELL_SECONDS = 0.5  # for this note; a store that does not answer is missed by all others themselves
LEFT = "left"  # key of the note
EXIT_FROZEN = 1


class Silence:
    """Heartbeats of a rank in the process group's store, and the watch over those of the next rank, until closed.

    Both are in threads of their own, so a rank that is slow, or waits, is not silent. Each rank watches the next, so
    the store has little work. `lost(why, seconds)` is called from a thread if the next rank, or the store, is silent
    for LOST_SECONDS, or if any rank has told that it leaves: a rank that waits for a third one, which is silent, has no
    connection that closes. A rank that has been frozen ends at once when it runs again: the others have gone on without
    it.
    """

    def __init__(self, store: Any, rank: int, world: int, lost: Callable[[str, float], None]) -> None:
        self._store, self._lost = store.clone(), lost
        self._own, self._next, self._name = f"alive/{rank}", f"alive/{(rank + 1) % world}", (rank + 1) % world
        self._closed = threading.Event()
        self._answered = self._heard = time.monotonic()
        self._threads = [
            threading.Thread(target=self._beat, daemon=True, name="elastic heartbeats"),
            threading.Thread(target=self._judge, daemon=True, name="elastic watch"),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the threads."""
        self._closed.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(1.0)

    def tell(self, why: str) -> None:
        """Tell the other ranks that this one leaves."""
        note = threading.Thread(target=self._tell, args=(why,), daemon=True)
        note.start()
        note.join(TELL_SECONDS)

    def _tell(self, why: str) -> None:
        with suppress(dist.DistError):
            self._store.compare_set(LEFT, "", why)  # the first rank knows best

    def _beat(self) -> None:
        count, last, due = 0, b"", 0.0
        while not self._closed.wait(LOOK_SECONDS if count else 0.0):
            with suppress(dist.DistError):  # the store is gone: so are the connections, or they are soon
                if self._store.check([LEFT]):
                    return self._end(self._store.get(LEFT).decode(), 0.0)
                if (now := time.monotonic()) < due:
                    continue
                due = now + PERIOD
                self._store.set(self._own, str(count := count + 1))
                beat = self._store.get(self._next) if self._store.check([self._next]) else b""
                now = time.monotonic()
                self._answered = now
                if beat != last or not beat:  # none yet: the rank starts, and its connections tell if it ends
                    self._heard, last = now, beat

    def _end(self, why: str, silent: float) -> None:
        if not self._closed.is_set():
            self._lost(why, silent)

    def _judge(self) -> None:
        looked, worked = time.monotonic(), time.process_time()
        while not self._closed.wait(LOOK_SECONDS):
            now, work = time.monotonic(), time.process_time()
            if now - looked > LOST_SECONDS - PERIOD and work - worked < 1.0:  # not Python's lock, held by a long call
                os._exit(EXIT_FROZEN)
            looked, worked = now, work
            if (silent := now - self._answered) > LOST_SECONDS:
                return self._end(f"no answer of the store for {silent:.0f} s", silent)
            if (silent := now - self._heard) > LOST_SECONDS:
                return self._end(f"no heartbeat of rank {self._name} for {silent:.0f} s", silent)


def cut_connections() -> None:
    """Shut down all TCP connections of this process, so that whatever waits for another rank raises.

    gloo cannot abort a collective that waits (`ProcessGroupGloo.abort` in torch 2.13 returns, and the wait goes on),
    and a call of a store has no other end either. Sockets that listen stay, as gloo aborts the process without them.
    """
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
                if tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)
