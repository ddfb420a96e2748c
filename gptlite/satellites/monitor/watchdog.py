"""Hang detection: names the stalled rank before the collectives of the others time out.

Two threads per rank do this, without touching the training code. One samples the position of the main thread, the other
writes heartbeats to the process group's store. When a rank has been in one collective for most of the time limit, it
reads all heartbeats and exits with an error. The error names the ranks that have stopped sending heartbeats (a stopped
process stops its threads too), or those that do not wait for others. No checkpoint is saved, and the launcher ends the
other ranks.
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
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import from_main
from gptlite.progress import format_duration
from gptlite.satellites.monitor.comm_time import CommunicationTime
from gptlite.satellites.monitor.flight_recorder import oldest_under_way
from gptlite.satellites.monitor.stack_sampling import Place, axes_of_groups, place_of, waits_along
from gptlite.satellites.monitor.verdict import Heartbeat, judge, silent_ranks
from gptlite.torch_private.distributed import default_store
from gptlite.torch_private.flight_recorder import collectives_started
from gptlite.trainer.observers import Unwatched, Watch

LOOK_SECONDS = 0.05  # interval at which the position of the main thread is sampled
ANSWER_SECONDS = 2.0  # time limit of a call to the store, which normally takes a millisecond or less
# A rank exits before a collective would fail, by MARGIN seconds or PART times the time limit, whichever is less.
MARGIN, PART = 10.0, 0.25


class RankStuck(RuntimeError):
    """Raised when a rank has stalled the others for nearly the time limit of a collective."""


def watch_ranks(mesh: Mesh, limit: float) -> Watch:
    """Return a watch over the thread that calls this, until closed. All ranks must call it. `limit` is the time limit
    of a collective in seconds."""
    return Unwatched() if mesh.world_size == 1 else RankWatch(mesh, limit)


class RankWatch:
    """Watchdog of the thread that creates it, until closed. All ranks, at least two, must create one.

    `limit` is the time limit of a collective in seconds. `ending` is called from another thread, with the RankStuck
    that is about to end this process.
    """

    def __init__(self, mesh: Mesh, limit: float) -> None:
        self._mesh = mesh
        self.ending: Callable[[Exception], None] = lambda error: None
        self._step, self._in_step = 0, False
        self._closed = threading.Event()
        self._period = max(1.0, min(10.0, limit / 10))
        self._end_after = limit - min(MARGIN, PART * limit)
        self._suspect_after = self._end_after - 3 * self._period  # leaves time for two heartbeats of each rank
        self.communication_time = CommunicationTime(mesh)
        self._groups = [dist.group.WORLD, *mesh.groups().values()]
        self._axes = axes_of_groups(mesh)
        self._mark: tuple | None = None
        self._since = self._last_answer = time.monotonic()
        place = Place()
        self._own = Heartbeat(mesh.rank, socket.gethostname(), os.getpid(), 0, time.time(), 0, place, 0.0)
        # A unique name, as a restarted run may find the previous run's store.
        name, self._store_host = from_main(mesh, lambda: (uuid.uuid4().hex, self._own.who))
        self._keys = [f"{name}/{rank}" for rank in range(mesh.world_size)]
        self._verdict_key = f"{name}/verdict"
        store = default_store()
        self._store = store.clone()  # its own connection, as the threads must not share the main thread's
        # Readings since a hang was suspected: the time, and the heartbeats of all ranks.
        self._readings: list[tuple[float, list[Heartbeat | None]]] = []
        self._suspecting, self._beat_ready = False, threading.Event()
        main = threading.get_ident()
        self._threads = [
            threading.Thread(target=self._sample_loop, args=(main,), daemon=True, name="watch over the ranks"),
            threading.Thread(target=self._publish_loop, daemon=True, name="heartbeats"),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the threads. Waits up to a second for a store call in progress."""
        self._closed.set()  # first, as the threads check it when they wake
        self._beat_ready.set()
        for thread in self._threads:
            thread.join(1.0)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Context manager for a training step, during which time in collectives is counted."""
        self._step, self._in_step = number, True
        try:
            yield
        finally:
            self._in_step = False

    def verdict(self) -> str | None:
        """Return the message of the rank that exited first, which explains later failures on this rank. Return None if
        there is no message, or if the store does not answer."""
        key = self._verdict_key
        return self._within_time(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def leave_verdict(self, text: str) -> None:
        """Publish the reason why this rank exits, unless another rank has already published one."""
        # Only the first message names the cause; later ones name its consequences.
        self._within_time(lambda: self._store.compare_set(self._verdict_key, "", text))

    def communication(self, step_seconds: float) -> dict[str, Any]:
        """Return entries for a metrics row, see CommunicationTime.row. All ranks must call it."""
        return self.communication_time.row(step_seconds)

    def _sample_loop(self, main: int) -> None:
        sampled, published = time.monotonic(), 0.0
        while not self._closed.wait(LOOK_SECONDS):
            now = time.monotonic()
            if self._in_step:
                self.communication_time.add(waits_along(main, self._axes), now - sampled)
            sampled = now
            mark = (
                self._step,
                self._in_step,
                collectives_started(self._groups),
            )  # a change is progress
            if mark != self._mark:
                self._mark, self._since = mark, now
            stood = now - self._since
            if now - published >= (self._period if stood < self._suspect_after else self._period / 4):
                published = now  # heartbeats are four times as frequent once a hang is suspected
                self._beat(place_of(main, self._axes), stood)

    def _beat(self, place: Place, stood: float) -> None:
        """Publish a heartbeat, and end this process if its main thread has been in one collective for too long."""
        # A GPU runs collectives while the main thread is elsewhere; only the flight recorder shows them.
        if stood > self._period and (self._mesh.device.type == "cuda" or stood > self._suspect_after):
            place = recorded(place)
        step, beat = self._step if self._in_step else 0, self._own.beat + 1
        self._own = replace(self._own, beat=beat, time=time.time(), step=step, place=place, stood=stood)
        self._suspecting = place.waits == "collective" and stood > self._suspect_after
        self._beat_ready.set()
        if self._suspecting and stood > self._end_after:
            text, silent = self._verdict_now()
            # Before exiting: as soon as this process ends, collectives fail on the other ranks, which report this text.
            self.leave_verdict(text)
            self._end(text, silent)

    def _publish_loop(self) -> None:
        """Write heartbeats to the store. Runs in a separate thread, since a store call never returns if the store's
        host is stopped."""
        while self._beat_ready.wait() and not self._closed.is_set():
            self._beat_ready.clear()
            with suppress(dist.DistError):  # the store is gone, together with the launcher
                self._store.set(self._keys[self._mesh.rank], self._own.encoded())
                # Keep the first and the last reading; _verdict_now compares them.
                self._readings = [*self._readings[:1], (time.monotonic(), self._read())] if self._suspecting else []
                self._last_answer = time.monotonic()

    def _read(self) -> list[Heartbeat | None]:
        if self._store.check(self._keys):
            return [Heartbeat.decoded(answer) for answer in self._store.multi_get(self._keys)]
        answers = (self._store.get(key) if self._store.check([key]) else b"" for key in self._keys)
        return [Heartbeat.decoded(answer) for answer in answers]

    def _within_time(self, call: Callable[[], Any]) -> Any:
        """Call the store and return the result, or None if it does not answer in time."""
        answers: list[Any] = []

        def ask() -> None:
            with suppress(dist.DistError):
                answers.append(call())

        # Store calls have no time limit, so the thread of a call that hangs is abandoned.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(ANSWER_SECONDS)
        return answers[0] if answers else None

    def _verdict_now(self) -> tuple[str, Sequence[Heartbeat]]:
        """Return the error message, and the last heartbeats of ranks that have stopped sending them."""
        silence = time.monotonic() - self._last_answer
        if silence > 2.5 * self._period or not self._readings:
            # The same test as in torch.distributed: the store is in the launcher's agent or in rank 0.
            agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            return (
                f"{'the launcher' if agent else self._store_host} has not answered for {format_duration(silence)}; it "
                f"hosts the store with the heartbeats; rank {self._mesh.rank} waits in {self._own.place.waiting_for}"
            ), ()
        (read_at, before), (_, beats) = self._readings[0], self._readings[-1]
        if time.monotonic() - read_at <= 2 * self._period:  # too early to expect a new heartbeat from every rank
            before = [None] * len(beats)
        return judge(before, beats, time.time()), silent_ranks(before, beats)

    def _end(self, text: str, silent: Sequence[Heartbeat]) -> None:
        """End this process with exit code 1, after reporting the error on standard error and to the launcher."""
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
        os._exit(1)  # sys.exit would only end this thread


def kill(beat: Heartbeat) -> None:
    """Send SIGKILL to a rank that no longer sends heartbeats, if this launcher started it on this machine. Otherwise
    the launcher would wait half a minute for it to exit."""
    # If the rank is on another machine, the process with its pid on this machine is an unrelated one.
    mine = Path("/proc/self/environ"), Path(f"/proc/{beat.pid}/environ")
    with suppress(OSError):
        own, other = (dict(e.split(b"=", 1) for e in path.read_bytes().split(b"\0") if b"=" in e) for path in mine)
        port = b"MASTER_PORT"
        if other.get(b"RANK") == str(beat.rank).encode() and port in own and own[port] == other.get(port):
            os.kill(beat.pid, signal.SIGKILL)


def recorded(place: Place) -> Place:
    """Return a place with the collective that the flight recorder shows in progress, if there is one. A GPU runs
    collectives while no thread waits for them."""
    if place.waits == "store" or (found := oldest_under_way()) is None:
        return place
    name, axis = found
    if axis == WORLD and place.axis:  # an axis that spans the world shares the world's group
        axis = place.axis
    return replace(place, waits="collective", collective=place.collective or name, axis=axis)
