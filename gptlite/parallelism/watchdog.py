"""Watching over the ranks: one that keeps the others waiting is named before their collectives run out of time.

Two threads of each rank do it, and nothing in what it trains. One looks at where the main thread stands, the other
leaves a word of that in the store for the other ranks. Once a rank has stood in one collective for most of the time
limit it reads the words of all, says who has fallen silent (a process that is stopped takes its threads along) or does
something else, and ends: nothing is saved, and the launcher ends the rest.
"""

from __future__ import annotations

import os
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
from gptlite.parallelism.mailbox import Mailbox
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.stack import Place, place_of, waits_along
from gptlite.parallelism.verdict import Verdict, Word, judge

LOOK_SECONDS = 0.05
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
        self._asks = self._ends - 3 * self._period  # time for two words of each
        self.communication_time = CommunicationTime(mesh)
        self._main, self._host = threading.get_ident(), socket.gethostname()
        self._groups = [dist.group.WORLD, *mesh.groups().values()]
        name = [uuid.uuid4().hex]  # a run that was started again may find the store of the one before
        dist.broadcast_object_list(name, src=0, device=mesh.device)
        store: Any = dist.distributed_c10d._get_default_store()
        self._mail = Mailbox(store, name[0], mesh.rank, mesh.world_size, self._period)
        self._beats, self._asked = 0, 0.0
        self._before: list[Word | None] = []
        self._mark: tuple | None = None
        self._since = time.monotonic()
        self._thread = threading.Thread(target=self._work, daemon=True, name="watch over the ranks")
        self._thread.start()

    def close(self) -> None:
        """Ends the threads."""
        self._closed.set()
        if self._mesh.world_size > 1:
            self._thread.join(1.0)
            self._mail.close()

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
        return self._mail.verdict() if self._mesh.world_size > 1 else None

    def communication(self, step_seconds: float) -> dict[str, Any]:
        """A metrics row's keys, see CommunicationTime.row; none with one rank. To be called by all ranks."""
        return self.communication_time.row(step_seconds) if self._mesh.world_size > 1 else {}

    def _work(self) -> None:
        looked, spoken = time.monotonic(), 0.0
        while not self._closed.wait(LOOK_SECONDS):
            now = time.monotonic()
            if self._in_step:
                self.communication_time.add(waits_along(self._main), now - looked)
            looked = now
            mark = (self._step, self._in_step, counts(self._groups))
            if mark != self._mark:
                self._mark, self._since = mark, now
            period = self._period if now - self._since < self._asks else self._period / 4
            if now - spoken >= period:
                spoken = now
                self._speak(now, now - self._since)

    def _speak(self, now: float, stood: float) -> None:
        """Leaves a word on where the main thread stands; if it has waited there for long, looks at the others'."""
        place = place_of(self._main)
        if stood > self._period and (self._mesh.device.type == "cuda" or stood > self._asks):
            place = recorded(place)
        self._beats += 1
        self._mail.post(str(self._word(place, stood)))
        self._mail.asking = place.waits == "collective" and stood > self._asks
        if not self._mail.asking:
            self._before, self._mail.words = [], []
            return
        if not self._before and self._mail.words:
            self._before, self._asked = read(self._mail.words), now
        if stood > self._ends:
            verdict = self._verdict(place, now)
            # First: once this process ends, the others' collectives fail, and they should know what for.
            self._mail.leave_verdict(verdict.text)
            end(RankStuck(verdict.text), verdict.silent, self.ending)

    def _word(self, place: Place, stood: float) -> Word:
        step = self._step if self._in_step else 0
        return Word(
            self._mesh.rank,
            self._host,
            os.getpid(),
            self._beats,
            time.time(),
            step,
            place.waits,
            place.collective,
            place.axis,
            place.words,
            stood,
        )

    def _verdict(self, place: Place, now: float) -> Verdict:
        silence = now - self._mail.answered
        if silence > 2.5 * self._period or not self._mail.words:
            host = Word.read(self._mail.host).who if self._mail.host else "rank 0"
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # as torch.distributed decides it
                host = "the launcher"
            waiting = self._word(place, 0).waiting_for
            return Verdict(
                f"{host} has said nothing for {silence:.0f} s, and the store of the ranks' words is there; "
                f"rank {self._mesh.rank} waits in {waiting}"
            )
        words = read(self._mail.words)
        # Too short a while before, and nobody need have spoken since.
        before = self._before if now - self._asked > 2 * self._period else [None] * len(words)
        return judge(before, words, time.time())


def recorded(place: Place) -> Place:
    """A place with what the process groups know: the name of the collective, which may run while no thread waits."""
    if place.waits == "store" or (found := oldest_under_way()) is None:
        return place
    name, axis = found
    if axis == WORLD and place.axis:  # an axis as long as the world has no group of its own
        axis = place.axis
    return replace(place, waits="collective", collective=place.collective or name, axis=axis)


def read(words: Sequence[str | None]) -> list[Word | None]:
    """Words, read."""
    return [None if word is None else Word.read(word) for word in words]


def end(error: RankStuck, silent: Sequence[Word], ending: Callable[[RankStuck], None]) -> None:
    """Ends this process with exit code 1, the error on standard error and where the elastic agent looks for it."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    with suppress(Exception):
        ending(error)
    try:
        raise error
    except RankStuck:
        with suppress(Exception):
            get_error_handler().record_exception(error)
    for word in silent:
        kill(word)
    os._exit(1)


def kill(word: Word) -> None:
    """Kills a silent rank that the same launcher has started here, which would wait half a minute for it to end."""
    mine = Path("/proc/self/environ"), Path(f"/proc/{word.pid}/environ")
    with suppress(OSError):
        own, other = (dict(e.split(b"=", 1) for e in path.read_bytes().split(b"\0") if b"=" in e) for path in mine)
        port = b"MASTER_PORT"
        if other.get(b"RANK") == str(word.rank).encode() and port in own and own[port] == other.get(port):
            os.kill(word.pid, signal.SIGKILL)
