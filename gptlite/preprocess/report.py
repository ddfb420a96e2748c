"""How far preprocessing is, now and then."""

import time
from datetime import timedelta

from gptlite.preprocess.blocks import Place
from gptlite.preprocess.inputs import STDIN, Source
from gptlite.progress import Log

_INTERVAL = 5.0  # seconds between two lines


class Report:
    """Bytes read of those on the disk, tokens made, tokens a second, and when it ends."""

    def __init__(self, sources: list[Source], log: Log):
        self._sources, self._log = sources, log
        self._total = sum(source.size for source in sources)
        self._known = all(source.path != STDIN for source in sources)
        self._first_read = 0
        self._started = self._reported = time.monotonic()

    def start(self, place: Place) -> None:
        """The clock starts, at `place`."""
        self._first_read = sum(source.size for source in self._sources[: place.source])
        self._started = self._reported = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since `start`."""
        return time.monotonic() - self._started

    def add(self, read: int, tokens: int) -> None:
        """`read` bytes in all, and `tokens` made since `start`."""
        now = time.monotonic()
        if now - self._reported < _INTERVAL:
            return
        self._reported = now
        rate = f"{tokens / 1e6:,.1f}M tokens, {tokens / self.seconds / 1e6:.2f}M tokens/s"
        if not self._known or not self._total:
            self._log(f"tokenizing: {rate}")
            return
        left = max(0, self._total - read)
        eta = timedelta(seconds=round(self.seconds * left / max(read - self._first_read, 1)))
        scale, unit = (1e9, "GB") if self._total >= 1e9 else (1e6, "MB")
        done = f"{read / scale:.2f} of {self._total / scale:.2f} {unit} ({read / self._total:.0%})"
        self._log(f"tokenizing: {done}, {rate}, ETA {eta}")
