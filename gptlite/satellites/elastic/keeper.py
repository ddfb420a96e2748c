"""Keeper of a node's ranks: forks them, with torch and gptlite imported, and gives them to the workers that come."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from gptlite.launch.worker import die_with
from gptlite.satellites.elastic.proxy import SOCKET
from gptlite.satellites.elastic.shelf import Shelf

LEAVE_SECONDS = 5.0  # in which a rank must come back after its worker has ended; blocked ranks do not
HOLD_SECONDS = 3.0  # in which the launcher ends the workers of a world that stops to grow; else it counts a failure
LINE = 65536  # bytes of a request, at most


@dataclass
class Seat:
    """A local rank: its memory, its process, and the worker that stands for it."""

    shelf: Shelf
    pulse: int  # file of the rank's last step, see roster.Pulse
    pid: int | None = None  # of the rank's process, until it is waited for
    control: socket.socket | None = None
    worker: socket.socket | None = None
    busy: bool = False  # between a task and its answer
    signalled: bool = False  # a signal has come through this worker
    deadline: float | None = None  # of a rank that must leave
    held: tuple[float, int] | None = None  # when to answer the worker, and the exit code
    waiting: tuple[socket.socket, dict[str, Any], list[int]] | None = None  # the next worker, and what it has sent
    ended: dict[str, Any] | None = None  # when the last process has ended by itself, and how
    rest: bytes = field(default=b"", repr=False)


class Keeper:
    """The loop of a keeper. `serve(control, shelf, pulse)` is what a forked rank runs; it does not return.

    Ends, with its ranks, when the process `launcher` ends.
    """

    def __init__(
        self, folder: Path, launcher: int, replicas: int, serve: Callable[[socket.socket, Shelf, int], NoReturn]
    ) -> None:
        self._folder, self._launcher, self._replicas, self._serve = folder, launcher, replicas, serve
        self._node = uuid.uuid4().hex
        self._places: dict[int, Seat] = {}
        self._selector = selectors.DefaultSelector()
        self._end = os.pidfd_open(launcher)  # raises ProcessLookupError if the launcher has ended
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def run(self, lock: int) -> None:
        """Serve workers until the launcher has ended. Closes the descriptor `lock` once they can connect."""
        path = self._folder / SOCKET
        place = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        self._listener.bind(f"/proc/self/fd/{place}/{SOCKET}.new")
        os.close(place)
        self._listener.listen(128)
        os.rename(f"{path}.new", path)  # a worker that sees it can connect
        os.close(lock)
        self._selector.register(self._end, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in self._selector.select(self._wait()):
                    if key.fileobj == self._end:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None:
                        key.data(key.fileobj)
                self._pass_deadlines()
        finally:
            for place in self._places.values():
                if place.pid is not None:
                    os.kill(place.pid, signal.SIGKILL)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self) -> float | None:
        times = [t for place in self._places.values() for t in (place.deadline, place.held and place.held[0]) if t]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _pass_deadlines(self) -> None:
        now = time.monotonic()
        for place in self._places.values():
            if place.deadline is not None and now >= place.deadline:
                place.deadline = None
                assert place.pid is not None
                os.kill(place.pid, signal.SIGKILL)  # noticed by the end of its control socket
            if place.held is not None and now >= place.held[0]:
                self._answer(place, place.held[1])

    def _accept(self) -> None:
        worker, _ = self._listener.accept()
        worker.settimeout(5.0)
        message, descriptors = b"", []
        try:
            while not message.endswith(b"\n"):
                part, fds, _, _ = socket.recv_fds(worker, LINE, 2)
                descriptors += fds
                if not part:
                    raise ConnectionError
                message += part
            request = json.loads(message)
            local = int(request["variables"]["LOCAL_RANK"])
        except (OSError, ValueError, KeyError, TypeError):
            for descriptor in descriptors:
                os.close(descriptor)
            return worker.close()
        place = self._places.get(local) or self._new(local)
        if place.waiting is not None:  # a worker that has not been served
            self._drop(*place.waiting)
        place.waiting = worker, request, descriptors
        if place.busy:
            self._ask_to_leave(place)
        elif place.held is not None:
            self._answer(place, place.held[1])
        else:
            self._begin(place)

    def _new(self, local: int) -> Seat:
        notes = next((each.shelf.notes for each in self._places.values()), None)
        shelf = Shelf.new(self._node, self._launcher, self._replicas, notes)
        place = self._places[local] = Seat(shelf, os.memfd_create("gptlite-pulse"))
        return place

    def _fork(self, place: Seat) -> None:
        ours, theirs = socket.socketpair()
        keeper = os.getpid()
        pid = os.fork()
        if not pid:
            die_with(keeper)
            self._forget(ours)
            self._serve(theirs, place.shelf, place.pulse)
        theirs.close()
        place.pid, place.control, place.rest = pid, ours, b""
        self._selector.register(ours, selectors.EVENT_READ, lambda _: self._hear(place))

    def _forget(self, *others: socket.socket) -> None:
        """Close what a rank does not need: a worker that is killed must be seen as gone."""
        self._selector.close()
        self._listener.close()
        os.close(self._end)
        for each in (*others, *(s for place in self._places.values() for s in (place.control, place.worker) if s)):
            each.close()
        for place in self._places.values():
            if place.waiting is not None:
                self._drop(*place.waiting)

    def _begin(self, place: Seat) -> None:
        assert place.waiting is not None
        if place.control is None:
            self._fork(place)
        assert place.control is not None
        worker, request, descriptors = place.waiting
        request["ended"], place.ended = place.ended, None
        place.waiting, place.worker, place.busy, place.signalled = None, worker, True, False
        socket.send_fds(place.control, [json.dumps(request).encode() + b"\n"], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._selector.register(worker, selectors.EVENT_READ, lambda _: self._relay(place, worker))

    def _relay(self, place: Seat, worker: socket.socket) -> None:
        """Pass a worker's signals to its rank; have the rank leave if the worker has ended."""
        try:
            received = worker.recv(64)
        except OSError:
            received = b""
        if not received:
            self._close_worker(place)
            if place.busy:
                self._ask_to_leave(place)
            return
        place.signalled = True
        if place.held is not None:
            return self._answer(place, place.held[1])
        for number in received.split():
            if place.busy and place.pid is not None:
                os.kill(place.pid, int(number))

    def _ask_to_leave(self, place: Seat) -> None:
        if place.deadline is None:
            place.deadline = time.monotonic() + LEAVE_SECONDS
            assert place.control is not None
            with contextlib.suppress(OSError):
                place.control.sendall(b'"leave"\n')

    def _hear(self, place: Seat) -> None:
        """Take a rank's exit code, or notice that its process has ended."""
        assert place.control is not None
        try:
            received = place.control.recv(64)
        except OSError:
            received = b""
        if received:
            place.rest += received
            if not place.rest.endswith(b"\n"):
                return
            code, place.rest = int(place.rest), b""
        else:
            self._selector.unregister(place.control)
            place.control.close()
            assert place.pid is not None
            _, status = os.waitpid(place.pid, 0)
            place.pid = None
            code = os.waitstatus_to_exitcode(status)
            place.ended = {"time": time.time(), "why": _ending(code)}
            code = code or 1  # without an answer
            place.control = None
        place.busy, place.deadline = False, None
        if code > 128 and not place.signalled and place.worker is not None and received and place.waiting is None:
            place.held = time.monotonic() + HOLD_SECONDS, code
        else:
            self._answer(place, code)

    def _answer(self, place: Seat, code: int) -> None:
        place.held = None
        if place.worker is not None:
            with contextlib.suppress(OSError):
                place.worker.sendall(b"%d\n" % code)
            self._close_worker(place)
        if place.waiting is not None:
            self._begin(place)

    def _close_worker(self, place: Seat) -> None:
        if place.worker is not None:
            self._selector.unregister(place.worker)
            place.worker.close()
            place.worker = None
        if place.held is not None:
            self._answer(place, place.held[1])

    @staticmethod
    def _drop(worker: socket.socket, request: dict[str, Any], descriptors: list[int]) -> None:
        worker.close()
        for descriptor in descriptors:
            os.close(descriptor)


def _ending(code: int) -> str:
    """Return how a process has ended; a negative exit code is a signal's number."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
