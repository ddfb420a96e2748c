"""Delivery of stop requests to ranks started by train.py. Signals alone do not suffice, since their launcher also uses
signals for other purposes."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

from gptlite.trainer.signals import SAME_SECONDS, SIGNALS, StopSignal

UNWIND_SECONDS = 5.0  # time limit for cleanup in a rank that is not training
LOOK_SECONDS = 0.05
EXIT_TERMINATED = 143


class LauncherStop(StopSignal):
    """Stop request as a file that the launcher writes, containing the signal's number.

    A signal alone is not a request: after a rank has failed, the elastic agent sends SIGTERM to the others. These ranks
    must not save, and must not wait in a collective for the failed rank. Therefore a thread polls for the file, which
    also works while the main thread waits in a collective.

    `launcher` is the launcher's process id; the rank exits when that process has ended. `stopped(code)` is called
    before a rank ends on request outside training.
    """

    def __init__(self, file: Path, launcher: int, stopped: Callable[[int], None]) -> None:
        super().__init__()
        self._file, self._launcher, self._stopped = file, launcher, stopped
        self._training = self._unwinding = False
        self._noticed: float | None = None  # time at which the file was first seen
        self._signalled: float | None = None  # time of the last signal
        self._lock = threading.RLock()
        self._bytes, wake = socket.socketpair()
        self._bytes.settimeout(LOOK_SECONDS)  # reads wait this long, which sets the interval of polling for the file
        wake.setblocking(False)  # required by set_wakeup_fd
        self._wake = wake  # keeps the socket open
        for number in SIGNALS:
            signal.signal(number, self._receive)
        # Python handlers run in the main thread only, which may be blocked in C++; the wakeup fd works even then.
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True, name="launcher's requests").start()

    def __enter__(self) -> "LauncherStop":
        self._training = True
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._check_file()  # this rank may have stopped with the others before its thread saw the file
            self._training = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._unwinding:
            raise KeyboardInterrupt

    def _watch(self) -> None:
        while os.getppid() == self._launcher:  # a rank must not outlive its launcher
            now = time.monotonic()
            if self._received_signal():
                self._signalled = now
            with self._lock:
                self._check_file()
            if self._unwinding and self._noticed is not None and now - self._noticed > UNWIND_SECONDS:
                os._exit(0)  # `stopped` has already written the result
            # The signal of a request may reach the whole process group, so wait for the launcher to write the file.
            # Without a file, the signal ends this rank.
            if self._signalled is not None and now - self._signalled > SAME_SECONDS:
                if self._noticed is None or self._signalled - self._noticed > SAME_SECONDS:
                    os._exit(EXIT_TERMINATED)
                self._signalled = None
        os._exit(EXIT_TERMINATED)

    def _received_signal(self) -> bool:
        try:
            return any(number in SIGNALS for number in self._bytes.recv(64))
        except TimeoutError:
            return False

    def _check_file(self) -> None:
        if self._noticed is not None or not self._file.exists():
            return
        self._noticed, number = time.monotonic(), int(self._file.read_text())
        if self._training:
            self._request(number)
            return
        self.received, self._unwinding = number, True
        self._stopped(128 + number)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)  # interrupts a wait of the main thread with KeyboardInterrupt
