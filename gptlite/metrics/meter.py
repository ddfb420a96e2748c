"""Throughput and remaining time of a run."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(kw_only=True)
class Throughput:
    """Throughput of optimizer steps. `read` returns the means since the previous `read`.

    A GPU runs asynchronously, so call `read` only when the host has waited for the device, such as after reading the
    loss. Time under `excluded()` (evaluation, saving) does not count in the speed, but counts in the ETA.

    Args:
        tokens_per_step, samples_per_step: size of a full global batch.
        flops_per_token: FLOPs of forward and backward without activation recomputation (PaLM, arXiv:2204.02311,
            appendix B); None: MFU is None.
        peak_flops: dense peak of one device in FLOP/s; None: MFU is None.
        num_devices: devices that share the global batch.
        clock: returns monotonic time in seconds.
    """

    tokens_per_step: int
    samples_per_step: int
    flops_per_token: float | None
    peak_flops: float | None
    num_devices: int = 1
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._window_start = self._pace_start = self.clock()
        self._window_steps = 0
        self._window_batches = self._pace_batches = 0.0  # a step with a smaller batch counts as a fraction
        self._excluded = 0.0
        self.spent: Counter[str] = Counter()  # seconds under `excluded` since the start, by cause
        self._first_pace: float | None = None

    def step(self, samples: int | None = None) -> None:
        """Count an optimizer step of `samples` samples; by default a full global batch."""
        batches = 1.0 if samples is None else samples / self.samples_per_step
        self._window_steps += 1
        self._window_batches += batches
        self._pace_batches += batches

    @contextmanager
    def excluded(self, cause: str = "other") -> Iterator[None]:
        """Exclude the time of the block from training time."""
        start = self.clock()
        try:
            yield
        finally:
            self._excluded += (seconds := self.clock() - start)
            self.spent[cause] += seconds  # type: ignore[assignment]

    def read(self) -> dict[str, float | None]:
        """Return `tokens_per_second`, `samples_per_second`, `step_seconds` and `mfu` (0 to 1), and start a new window.

        Raises:
            RuntimeError: no step since the last `read`.
        """
        if self._window_steps == 0:
            raise RuntimeError("Throughput.read() needs at least one step() since the last read()")
        now = self.clock()
        window = max(now - self._window_start - self._excluded, 1e-9)  # avoids a division by zero with a coarse clock
        batch_seconds = window / self._window_batches
        tokens_per_second = self.tokens_per_step / batch_seconds
        mfu = None
        if self.peak_flops is not None and self.flops_per_token is not None:
            mfu = tokens_per_second * self.flops_per_token / (self.peak_flops * self.num_devices)
        if self._first_pace is None:
            # The first window compiles, allocates and fills caches; including it would overestimate the ETA.
            self._first_pace = (now - self._pace_start) / self._pace_batches
            self._pace_start, self._pace_batches = now, 0.0
        steps = self._window_steps
        self._window_start, self._window_steps, self._window_batches, self._excluded = now, 0, 0.0, 0.0
        return {
            "tokens_per_second": tokens_per_second,
            "samples_per_second": self.samples_per_step / batch_seconds,
            "step_seconds": window / steps,
            "mfu": mfu,
        }

    def speed(self) -> float:
        """Return the mean tokens per second since the last `read`, without starting a new window."""
        window = max(self.clock() - self._window_start - self._excluded, 1e-9)
        return self.tokens_per_step * self._window_batches / window

    def eta_seconds(self, remaining: float) -> float | None:
        """Estimate the seconds for `remaining` full batches at the pace so far, including evaluations and saves.

        None before the first step.
        """
        pace = self._first_pace
        if self._pace_batches:
            pace = (self.clock() - self._pace_start) / self._pace_batches
        return None if pace is None else pace * remaining
