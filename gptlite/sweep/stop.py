"""How a signal ends a sweep: the cells that run save and stop, no other starts."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType

from hydra.core.hydra_config import HydraConfig

from gptlite.sweep.ended import HERE, Ended
from gptlite.sweep.folder import SweepFolder
from gptlite.trainer.signals import SAME_SECONDS, SIGNALS

LOOK_SECONDS = 0.2


def in_this_process() -> bool:
    """Whether the launcher runs the cells in the process of the sweep."""
    return str(HydraConfig.get().launcher._target_).endswith(HERE)


class SweepSignals:
    """In the sweep's own process, until it ends: the first of SIGNALS stops the sweep, a second one at once.

    While a cell runs in this process its launcher has the signals, and the cell's job raises Ended. Where cells run in
    other processes they are told by a file, and the launcher goes on waiting for them; before `folder_is_open` there
    is no place for that file, and no cell has begun.
    """

    def __init__(self, folder: SweepFolder, here: bool) -> None:
        self.received: int | None = None
        self.folder_is_open = False
        self._folder, self._here, self._since = folder, here, 0.0
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._since = number, time.monotonic()
            if self._here or not self.folder_is_open:
                raise Ended(128 + number)
            self._folder.ask_to_stop(number)
            os.write(2, b"\nstopping: cells that run save and end, no other starts (again: at once)\n")
        elif time.monotonic() - self._since > SAME_SECONDS / 2:  # not the same one by way of the process group
            raise Ended(128 + number)


class Listener:
    """While a cell runs in a process of its own: passes on that the sweep was told to stop, or has died.

    The launcher of the ranks has the signals as soon as it runs. One that comes before waits for it here.
    """

    def __init__(self, folder: SweepFolder, here: bool) -> None:
        self._folder, self._here, self._over = folder, here, threading.Event()
        self._asked = False

    def __enter__(self) -> Listener:
        if not self._here:
            for number in SIGNALS:
                signal.signal(number, self._receive)
            threading.Thread(target=self._watch, daemon=True, name="the sweep's requests").start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The handlers stay: of joblib's workers an idle one that a Ctrl-C ended would have all others killed.
        self._over.set()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            asked = self._asked or self._folder.asked_to_stop() is not None or self._folder.deserted()
            handler = signal.getsignal(signal.SIGTERM)
            if asked and handler != self._receive:
                launcher = getattr(handler, "__self__", None)
                if getattr(launcher, "received", None) is None:  # else Ctrl-C has reached it by itself
                    os.kill(os.getpid(), signal.SIGTERM)
                return
