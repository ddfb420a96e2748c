"""Hang detection: a rank that keeps the others waiting is named before their collectives run out of time.

Two threads of each rank do it, and nothing in what it trains. One looks at where the main thread stands, the other
leaves heartbeats in the process group's store. Once a rank has stood in one collective for most of the time limit it
reads the heartbeats of all, says who has fallen silent (a process that is stopped takes its threads along) or does
something else, and ends: nothing is saved, and the launcher ends the rest.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from gptlite.parallelism.axes import WORLD
from gptlite.parallelism.comm_time import CommunicationTime
from gptlite.parallelism.flight_recorder import counts, oldest_under_way
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import from_main
from gptlite.parallelism.stack_sampling import Place, place_of, waits_along
from gptlite.parallelism.verdict import Heartbeat, judge, silent_ranks

LOOK_SECONDS = 0.05
ANSWER_SECONDS = 2.0  # for a store that answers, thousands of times enough
# Between naming the rank and the time limit, so that it is named before a collective fails: seconds, part of the limit.
MARGIN, PART = 10.0, 0.25


class RankStuck(RuntimeError):
    """A rank has kept others waiting for nearly as long as a collective may take."""


class Watch:
    """Watches the thread that makes it, until it is closed. To be made by all ranks; with one rank it does nothing.

    `limit` is the time limit of a collective in seconds. `ending` is called, from another thread, with the RankStuck
    that is about to end this process.
    """

    def __init__(self, mesh: Mesh, limit: float) -> None:
        self._mesh = mesh
        self.ending: Callable[[RankStuck], None] = lambda error: None
        self._step, self._in_step = 0, False
        self._closed = threading.Event()
        if mesh.world_size == 1:
            return
        self._period = max(1.0, min(10.0, limit / 10))
        self._ends = limit - min(MARGIN, PART * limit)
        self._asks = self._ends - 3 * self._period  # time for two heartbeats of each
        self.communication_time = CommunicationTime(mesh)
        self._groups = [dist.group.WORLD, *mesh.groups().values()]
        self._mark: tuple | None = None
        self._since = self._answered = time.monotonic()
        place = Place()
        self._own = Heartbeat(mesh.rank, socket.gethostname(), os.getpid(), 0, time.time(), 0, place, 0.0)
        # The name is new: a run that was started again may find the store of the one before.
        name, self._store_host = from_main(mesh, lambda: (uuid.uuid4().hex, self._own.who))
        self._keys = [f"{name}/{rank}" for rank in range(mesh.world_size)]
        self._verdict_key = f"{name}/verdict"
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store.clone()
        self._heard: list[tuple[float, list[Heartbeat | None]]] = []  # heartbeats of all, once this rank suspects one
        self._suspects, self._spoken = False, threading.Event()
        main = threading.get_ident()
        self._threads = [
            threading.Thread(target=self._look, args=(main,), daemon=True, name="watch over the ranks"),
            threading.Thread(target=self._talk, daemon=True, name="heartbeats"),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the threads. A call to the store that is under way is waited for a moment."""
        self._closed.set()
        if self._mesh.world_size > 1:
            self._spoken.set()
            for thread in self._threads:
                thread.join(1.0)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """While entered, this training step is taken, and its time in collectives counts."""
        self._step, self._in_step = number, True
        try:
            yield
        finally:
            self._in_step = False

    def verdict(self) -> str | None:
        """Why some rank has ended all, if one has: the cause of what fails on this one afterwards."""
        if self._mesh.world_size == 1:
            return None
        key = self._verdict_key
        return self._within_time(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def leave_verdict(self, text: str) -> None:
        """Leaves for all ranks why this one ends, unless another has."""
        self._within_time(lambda: self._store.compare_set(self._verdict_key, "", text))

    def communication(self, step_seconds: float) -> dict[str, Any]:
        """A metrics row's keys, see CommunicationTime.row; none with one rank. To be called by all ranks."""
        return self.communication_time.row(step_seconds) if self._mesh.world_size > 1 else {}

    def _look(self, main: int) -> None:
        looked, spoken = time.monotonic(), 0.0
        while not self._closed.wait(LOOK_SECONDS):
            now = time.monotonic()
            if self._in_step:
                self.communication_time.add(waits_along(main), now - looked)
            looked = now
            mark = (self._step, self._in_step, counts(self._groups))
            if mark != self._mark:
                self._mark, self._since = mark, now
            stood = now - self._since
            if now - spoken >= (self._period if stood < self._asks else self._period / 4):
                spoken = now
                self._beat(place_of(main), stood)

    def _beat(self, place: Place, stood: float) -> None:
        """Leaves a heartbeat; ends this process if it has waited in its place for too long."""
        if stood > self._period and (self._mesh.device.type == "cuda" or stood > self._asks):
            place = recorded(place)
        step, beat = self._step if self._in_step else 0, self._own.beat + 1
        self._own = replace(self._own, beat=beat, time=time.time(), step=step, place=place, stood=stood)
        self._suspects = place.waits == "collective" and stood > self._asks
        self._spoken.set()
        if self._suspects and stood > self._ends:
            text, silent = self._judged()
            # First: once this process ends, the others' collectives fail, and they should know what for.
            self.leave_verdict(text)
            self._end(text, silent)

    def _talk(self) -> None:
        """Hands heartbeats on. By itself: where the store's host has stopped, a call never returns."""
        while self._spoken.wait() and not self._closed.is_set():
            self._spoken.clear()
            with suppress(dist.DistError):  # the store has gone, and the launcher with it
                self._store.set(self._keys[self._mesh.rank], pickle.dumps(self._own))
                # The first and the last are compared.
                self._heard = [*self._heard[:1], (time.monotonic(), self._read())] if self._suspects else []
                self._answered = time.monotonic()

    def _read(self) -> list[Heartbeat | None]:
        if self._store.check(self._keys):
            return [pickle.loads(answer) for answer in self._store.multi_get(self._keys)]
        return [pickle.loads(self._store.get(key)) if self._store.check([key]) else None for key in self._keys]

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

    def _judged(self) -> tuple[str, Sequence[Heartbeat]]:
        """The verdict, and the ranks that have fallen silent."""
        silence = time.monotonic() - self._answered
        if silence > 2.5 * self._period or not self._heard:
            # As torch.distributed decides it.
            agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            return (
                f"{'the launcher' if agent else self._store_host} has said nothing for {silence:.0f} s, and the store "
                f"of the ranks' words is there; rank {self._mesh.rank} waits in {self._own.place.waiting_for}"
            ), ()
        (asked, before), (_, beats) = self._heard[0], self._heard[-1]
        if time.monotonic() - asked <= 2 * self._period:  # nobody need have spoken since
            before = [None] * len(beats)
        return judge(before, beats, time.time()), silent_ranks(before, beats)

    def _end(self, text: str, silent: Sequence[Heartbeat]) -> None:
        """Ends this process with exit code 1, the error on standard error and where the launcher looks for it."""
        print(f"error: {text}", file=sys.stderr, flush=True)
        try:
            raise RankStuck(text)
        except RankStuck as error:
            with suppress(Exception):
                self.ending(error)
            with suppress(Exception):
                get_error_handler().record_exception(error)
        for beat in silent:
            kill(beat)
        os._exit(1)


def kill(beat: Heartbeat) -> None:
    """Kills a silent rank that the same launcher has started here, which would wait half a minute for it to end."""
    mine = Path("/proc/self/environ"), Path(f"/proc/{beat.pid}/environ")
    with suppress(OSError):
        own, other = (dict(e.split(b"=", 1) for e in path.read_bytes().split(b"\0") if b"=" in e) for path in mine)
        port = b"MASTER_PORT"
        if other.get(b"RANK") == str(beat.rank).encode() and port in own and own[port] == other.get(port):
            os.kill(beat.pid, signal.SIGKILL)


def recorded(place: Place) -> Place:
    """A place with what the process groups know: the name of the collective, which may run while no thread waits."""
    if place.waits == "store" or (found := oldest_under_way()) is None:
        return place
    name, axis = found
    if axis == WORLD and place.axis:  # an axis as long as the world has no group of its own
        axis = place.axis
    return replace(place, waits="collective", collective=place.collective or name, axis=axis)
