"""Ctrl-C and SIGTERM as a request that the loop answers between two steps."""

import contextlib
import os
import signal
from types import FrameType, TracebackType


class StopSignal:
    """While entered, the first SIGINT or SIGTERM sets `received`; a second one ends the process at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def exit_code(self) -> int:
        """128 + the signal, as a shell counts it; 0 where none came."""
        return 0 if self.received is None else 128 + self.received

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for each in self._previous:
            signal.signal(each, signal.SIG_DFL)
        # Not print: the signal may have interrupted one, and the terminal or pipe may be gone with the same Ctrl-C.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{signal.Signals(number).name}: saving after this step (again: stop at once)\n".encode())
