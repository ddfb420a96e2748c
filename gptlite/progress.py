"""Progress lines for work that takes more than a few seconds."""

import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from gptlite.errors import printable

Log = Callable[[str], None]
PROGRESS = re.compile(r"\bETA \S+$")


def log(line: str) -> None:
    """Print a line to standard error, so that scripts can read a command's results from standard output."""
    print(printable(line, "\n"), file=sys.stderr, flush=True)


def counted(number: int, word: str) -> str:
    """Return e.g. `1 thread`, `2 threads`, `2 micro-batches`."""
    return f"{number} {word}" if number == 1 else f"{number:,} {word}{'es' if word.endswith('ch') else 's'}"


def format_count(number: float) -> str:
    """Format a count with up to three digits: `87`, `12.3k`, `124M`, `1.50B`, `3.20T`."""
    return _scaled(number, 1000, ("", "k", "M", "B", "T"))


def format_bytes(number: float) -> str:
    """Format a size in binary units: `512 B`, `1.50 KiB`, `0.98 GiB`. The next unit starts at 1000, to keep three
    digits."""
    return _scaled(number, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def format_duration(seconds: float) -> str:
    """Format a time span in its two largest units: `8s`, `2m31s`, `1h05m`, `3d04h`; `n/a` if it is not finite."""
    if not math.isfinite(seconds):
        return "n/a"
    whole = round(seconds)
    for large, name, small, second in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= large:
            return f"{whole // large}{name}{whole % large // small:02d}{second}"
    return f"{whole}s"


@contextmanager
def working(label: str, log: Log, patience: float = 5.0, interval: float = 10.0) -> Iterator[None]:
    """Context manager for work whose amount is not known: a line after `patience` seconds, and then every `interval`.

    `log` is called in another thread.
    """
    over, started = Event(), time.monotonic()

    def tell() -> None:
        pause = patience
        while not over.wait(pause):
            log(f"{label}: {format_duration(time.monotonic() - started)} so far")
            pause = interval

    thread = Thread(target=tell, daemon=True, name=label)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()  # so that no line follows those of the next work


class Console:
    """Standard output of a run. In a notebook, a progress line (ending with an ETA) replaces the one just before."""

    def __init__(self) -> None:
        self._updating = in_notebook()
        self._open = 0  # length of the line that the next progress line replaces

    def print(self, text: str) -> None:
        """Print a text of one or more lines."""
        if not self._updating:
            print(text, flush=True)
            return
        progress = bool(PROGRESS.search(text))
        before = ("\r" if progress else "\n") if self._open else ""
        print(before + text.ljust(self._open * progress), end="" if progress else "\n", flush=True)
        self._open = len(text) if progress else 0


def in_notebook() -> bool:
    """Return True in a Jupyter kernel."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


class Progress:
    """Progress log: a line every `interval` seconds with the amount done and the ETA; silent for shorter jobs.

    Amounts are in bytes, or in `unit`. `done` is the amount completed by an earlier process.
    """

    def __init__(self, label: str, total: int, log: Log, interval: float = 5.0, done: int = 0, unit: str = ""):
        self._label, self._unit = label, unit
        self._total = total
        self._log = log
        self._interval = interval
        self._done = self._before = done
        self._started = self._reported = time.monotonic()

    def add(self, number: int, rate: str = "") -> None:
        """Add `number` to the amount done. Threads may share this object: an update lost in a race only delays a line.

        `rate` is a text that replaces the MB/s. If the total is 0 (unknown), the line shows only this text.
        """
        self._done += number
        now = time.monotonic()
        if now - self._reported < self._interval or not (self._done or rate):
            return
        self._reported = now
        if rate and not self._total:
            self._log(f"{self._label}: {rate}")
            return
        # The rate excludes the amount completed by an earlier process.
        left, new = max(0, self._total - self._done), max(1, self._done - self._before)
        eta = format_duration((now - self._started) * left / new)
        if self._unit:
            if left:
                self._log(f"{self._label}: {self._done} of {self._total} {self._unit}, ETA {eta}")
            return
        scale, unit = (1e9, "GB") if self._total >= 1e9 else (1e6, "MB")
        share = self._done / max(self._total, 1)
        rate = rate or f"{new / (now - self._started) / 1e6:.0f} MB/s"
        done = f"{self._done / scale:.2f} of {self._total / scale:.2f} {unit} ({share:.0%})"
        self._log(f"{self._label}: {done}, {rate}, ETA {eta}")


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    if not math.isfinite(number):
        return str(number)
    if number < 0:
        return "-" + _scaled(-number, base, units)
    index, scaled = 0, float(number)
    # 999.5 would be printed with four digits, as 1000.
    while scaled >= 999.5 and index + 1 < len(units):
        scaled /= base
        index += 1
    digits = 0 if index == 0 or scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{scaled:.{digits}f}{units[index]}"
