"""Growth of the global batch with the gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162): a batch below it
gains almost in proportion to its size, and the noise scale rises as the loss falls.

A decision is a function of a step's number, of the averages after this step, and of the sizes so far, which checkpoints
store. It is therefore equal on all ranks, and in a repeated or resumed run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gptlite.data.batch_loader import BatchLoader
from gptlite.data.batches import Range
from gptlite.data.config import DataConfig
from gptlite.satellites.noise.estimate import NoiseEstimate


@dataclass(frozen=True)
class NoiseRamp:
    """Rule of data.batch_ramp=[first size, increment] for the batches of a `loader`.

    After every `interval` steps, the batch grows by one increment if the noise scale is above `factor` times its size.
    The interval lets the average adapt to the last size. Only the loader's schedule has state.
    """

    loader: BatchLoader
    factor: float
    interval: int

    @property
    def grown(self) -> tuple[Range, ...]:
        """Changes of size so far, also one that is yet to come: (position of the first batch, size)."""
        return self.loader.schedule.grown

    def decide(self, estimate: NoiseEstimate, step: int, stop: int) -> None:
        """Let the batch grow if the averages ask for it. They end with step number `step`, whose samples end before
        `stop`. If the mean gradient is lost in the noise, the noise scale is above any batch.

        The size changes with the next step but one: on a GPU, the next step begins before the totals of this one are
        read. Batches that have been read ahead have the old schedule as their key, and are read again.
        """
        if step % self.interval:
            return
        schedule = self.loader.schedule
        begin = schedule.after(stop)
        size = schedule.size(begin)
        larger = next((each for each in schedule.sizes() if each > size), None)
        if larger is not None and estimate.exceeds(self.factor * size):
            self.loader.schedule = replace(schedule, grown=(*schedule.grown, (begin, larger)))

    def restore(self, grown: Sequence[Sequence[int]]) -> None:
        """Restore the changes of a checkpoint. If the run resumes with other sizes, one that does not exist any more
        becomes the largest below it."""
        sizes, changes = self.loader.schedule.sizes(), sorted(map(tuple, grown))
        known = tuple((begin, sizes[max(bisect_right(sizes, size) - 1, 0)]) for begin, size in changes)
        self.loader.schedule = replace(self.loader.schedule, grown=known)


def build_ramp(config: DataConfig, loader: BatchLoader) -> NoiseRamp | None:
    """Return the rule by which the batch grows with the noise scale; None if the configuration does not ask for it."""
    return NoiseRamp(loader, config.ramp_factor, config.ramp_steps) if loader.schedule.measured else None
