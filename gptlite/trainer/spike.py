"""Spikes of the loss: when there is one, and which samples a run then goes on without.

PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1) was taken back to a checkpoint from before each spike and
on without the batches around it, by hand; the same batches on other weights made no spike. This does it by rule.

Every rank decides by the same numbers, the loss of the whole step and what a checkpoint remembers of those before, so
all decide alike, and a run that is repeated or resumed decides as it did.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any

from gptlite.trainer.config import SpikeConfig

DEVIATION = 1.4826  # a normal distribution's standard deviation, in median absolute deviations


class Spiked(RuntimeError):
    """A spike that the run is not taken back from. The last good checkpoints are as they were."""


@dataclass(frozen=True)
class Seen:
    """A step that was taken: the position where its samples begin, and its loss."""

    begin: int
    loss: float


@dataclass(frozen=True)
class Spike:
    """What is to be skipped for what was seen at a step: the samples from `first` up to `stop`. `why`, in words."""

    step: int
    first: int
    stop: int
    why: str


class SpikeWatch:
    """Looks at the loss of every step.

    The band ends `threshold` standard deviations above the middle of the last `window` losses, but at least `rise` nats
    above it. Middle and deviation are the median and the median absolute deviation, which a spike hardly moves.
    `patience` losses in a row above the band are a spike, and so is at once one that is not finite. The samples of
    these steps and of the `margin` steps before them are skipped: the last good step may be what broke the weights.
    """

    def __init__(self, config: SpikeConfig) -> None:
        self.config = config
        self.steps: list[Seen] = []  # the last ones inside the band, at most `window`
        self.high: list[Seen] = []  # those above it since, in a row
        self.rewinds = 0

    @property
    def suspects(self) -> bool:
        """Whether the last loss was above the band: what is saved now may have to be left again."""
        return bool(self.high)

    def limit(self) -> float:
        """Where the band ends, in nats; infinity until `window` steps are known."""
        if len(self.steps) < self.config.window:
            return math.inf
        losses = [step.loss for step in self.steps]
        middle = median(losses)
        deviation = DEVIATION * median(abs(loss - middle) for loss in losses)
        return middle + max(self.config.threshold * deviation, self.config.rise)

    def taken(self, number: int, begin: int, stop: int, loss: float) -> Spike | None:
        """Step `number`, over the samples from `begin` up to `stop`, has been taken. Its spike, if it is one."""
        step, limit = Seen(begin, loss), self.limit()
        if loss <= limit:
            # What was high and is over was no spike, but part of what losses do.
            self.steps = [*self.steps, *self.high, step][-self.config.window :]
            self.high = []
            return None
        self.high.append(step)
        if len(self.high) < self.config.patience:
            return None
        often = f" for {len(self.high)} steps" if len(self.high) > 1 else ""
        return self._spike(number, stop, f"loss {loss:.4f} is above the band, which ends at {limit:.4f}{often}")

    def failed(self, number: int, begin: int, stop: int, why: str) -> Spike:
        """Step `number` has a loss or gradient that is not finite, and was not taken."""
        self.high.append(Seen(begin, math.inf))
        return self._spike(number, stop, why)

    def _spike(self, number: int, stop: int, why: str) -> Spike:
        first = [*self.steps, *self.high][-len(self.high) - self.config.margin :][0]
        return Spike(number, first.begin, stop, why)

    def meta(self) -> dict[str, Any]:
        """What it remembers, as JSON."""
        return {
            "steps": [[step.begin, step.loss] for step in self.steps],
            "high": [[step.begin, step.loss] for step in self.high],
            "rewinds": self.rewinds,
        }

    def load_meta(self, meta: dict[str, Any] | None) -> None:
        """Takes back what `meta` gave; None, of a run that had no watch: it begins anew."""
        meta = meta or {"steps": [], "high": [], "rewinds": 0}
        self.steps, self.high = ([Seen(*pair) for pair in meta[key]] for key in ("steps", "high"))
        self.rewinds = meta["rewinds"]


def build_spike_watch(config: SpikeConfig) -> SpikeWatch | None:
    """The watch of a run; None where spikes are left alone."""
    return SpikeWatch(config) if config.policy == "skip" else None
