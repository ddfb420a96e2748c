"""Detection of loss spikes, and the samples to skip after one.

PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1) was manually restarted from a checkpoint before each spike,
skipping the batches around it. The same batches with other weights did not cause a spike. This module automates the
restart.

The decision depends only on the loss of the whole step and on the history stored in checkpoints. It is therefore equal
on all ranks, and in a repeated or resumed run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any

from gptlite.config.trainer import SpikeConfig
from gptlite.errors import RunEnded

DEVIATION = 1.4826  # a normal distribution's standard deviation, in median absolute deviations


class Spiked(RunEnded):
    """Raised for a spike if the run cannot rewind. Earlier checkpoints are unchanged."""

    word = "spiked"
    advice = (
        ". Nothing was saved after the spike began, and earlier checkpoints are intact. "
        "Try a lower optimizer.lr (now {lr:g}), or a larger trainer.spike.margin, which skips more samples at once"
    )


@dataclass(frozen=True)
class Seen:
    """Completed step: the position of its first sample in the data order, and its loss."""

    begin: int
    loss: float


@dataclass(frozen=True)
class Spike:
    """Spike at a step: skip the samples from `first` up to `stop`. `why` is the reason in words."""

    step: int
    first: int
    stop: int
    why: str


class SpikeWatch:
    """Spike detector, updated with the loss of every step.

    The band is the range of normal losses. Its upper limit is `threshold` standard deviations, but at least `rise`
    nats, above the median of the last `window` losses. The standard deviation is estimated from the median absolute
    deviation. Unlike a mean and a variance, medians hardly change with a spike. `patience` consecutive losses above the
    band are a spike, and so is a single non-finite loss. The samples of these steps and of the `margin` steps before
    them are skipped, as the last good step may have damaged the weights.
    """

    def __init__(self, config: SpikeConfig) -> None:
        self.config = config
        self.steps: list[Seen] = []  # the last steps inside the band, at most `window`
        self.high: list[Seen] = []  # consecutive steps above the band since then
        self.rewinds = 0  # rewinds of the run so far

    @property
    def suspects(self) -> bool:
        """True if the last loss was above the band, so that a checkpoint made now may have to be discarded."""
        return bool(self.high)

    def limit(self) -> float:
        """Return the upper limit of the band in nats; infinity before `window` steps are recorded."""
        if len(self.steps) < self.config.window:
            return math.inf
        losses = [step.loss for step in self.steps]
        middle = median(losses)
        deviation = DEVIATION * median(abs(loss - middle) for loss in losses)
        return middle + max(self.config.threshold * deviation, self.config.rise)

    def taken(self, number: int, begin: int, stop: int, loss: float) -> Spike | None:
        """Record step `number`, over the samples from `begin` up to `stop`. Returns a Spike if one is detected."""
        step, limit = Seen(begin, loss), self.limit()
        if loss <= limit:
            # Fewer than `patience` high losses are not a spike; they join the band's history.
            self.steps = [*self.steps, *self.high, step][-self.config.window :]
            self.high = []
            return None
        self.high.append(step)
        if len(self.high) < self.config.patience:
            return None
        often = f" ({len(self.high)} consecutive steps)" if len(self.high) > 1 else ""
        return self._spike(number, stop, f"loss {loss:.4f} is above the upper limit of {limit:.4f}{often}")

    def failed(self, number: int, begin: int, stop: int, why: str) -> Spike:
        """Record step `number`, which has a non-finite loss or gradient and was not applied, and return its spike."""
        self.high.append(Seen(begin, math.inf))  # infinity is above every limit
        return self._spike(number, stop, why)

    def _spike(self, number: int, stop: int, why: str) -> Spike:
        # The slice is shorter if fewer than `margin` steps precede the spike; [0] is then the first known step.
        first = [*self.steps, *self.high][-len(self.high) - self.config.margin :][0]
        return Spike(number, first.begin, stop, why)

    def meta(self) -> dict[str, Any]:
        """Return the state in JSON form."""
        return {
            "steps": [[step.begin, step.loss] for step in self.steps],
            "high": [[step.begin, step.loss] for step in self.high],
            "rewinds": self.rewinds,
        }

    def load_meta(self, meta: dict[str, Any] | None) -> None:
        """Restore the state returned by `meta`; None, from a run without a detector, resets it."""
        meta = meta or {"steps": [], "high": [], "rewinds": 0}
        self.steps, self.high = ([Seen(*pair) for pair in meta[key]] for key in ("steps", "high"))
        self.rewinds = meta["rewinds"]


def build_spike_watch(config: SpikeConfig) -> SpikeWatch | None:
    """Build the spike detector of a run; None unless the policy is "skip"."""
    return SpikeWatch(config) if config.policy == "skip" else None
