"""Progress of jobs that read or write many bytes."""

import time
from collections.abc import Callable

Log = Callable[[str], None]


class Progress:
    """A line every `interval` seconds with what is done and what is left; a job shorter than that stays silent."""

    def __init__(self, label: str, total_bytes: int, log: Log, interval: float = 5.0):
        self.label = label
        self.total = total_bytes
        self.log = log
        self.interval = interval
        self.done = 0
        self.started = self.reported = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Counts bytes just handled."""
        self.done += num_bytes
        now = time.monotonic()
        if now - self.reported >= self.interval and self.done:
            self.reported = now
            left = (now - self.started) * max(0, self.total - self.done) / self.done
            self.log(f"{self.label}: {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB | ETA {left:.0f}s")
