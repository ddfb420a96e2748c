"""One line now and then on work that takes longer than a few seconds."""

import time
from collections.abc import Callable

Log = Callable[[str], None]


class Progress:
    """Says how far `label` has come and when it will be done, every `interval` seconds and never before the first."""

    def __init__(self, label: str, total_bytes: int, log: Log, interval: float = 2.0):
        self._label = label
        self._total = total_bytes
        self._log = log
        self._interval = interval
        self._done = 0
        self._start = self._last = time.monotonic()

    def advance(self, num_bytes: int) -> None:
        """Count `num_bytes` more as done."""
        self._done += num_bytes
        now = time.monotonic()
        if now - self._last < self._interval:
            return
        self._last = now
        eta = (now - self._start) * (self._total - self._done) / max(self._done, 1)
        share = self._done / max(self._total, 1)
        self._log(f"{self._label}: {self._done / 1e6:.1f} of {self._total / 1e6:.1f} MB ({share:.0%}), ETA {eta:.0f} s")
