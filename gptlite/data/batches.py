"""How large each global batch is and which samples are in it: pure functions of the samples before it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING

from gptlite.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

Range = tuple[int, int]  # of stream numbers: the first, and the one after the last


@dataclass(frozen=True)
class BatchSchedule:
    """Cuts the run's endless row of samples, numbered 0, 1, ..., into global batches.

    A position in the row is the number of the next sample, as `consumed_samples` of a checkpoint is. Batches follow
    one another without a gap, but for the `skipped` ranges, which no batch reads; as `skipping` makes them, they are
    sorted and apart.

    `ramp` is (start, increment, samples), as in Megatron's --rampup-batch-size: the size begins at `start` and grows by
    `increment` at equal distances, (global_batch_size - start) / increment times until position `samples`.
    """

    global_batch_size: int
    ramp: tuple[int, int, int] | None = None
    skipped: tuple[Range, ...] = ()

    def sizes(self) -> list[int]:
        """Every size that a global batch can have, smallest first."""
        return [size for _, size in self._levels]

    def size(self, position: int) -> int:
        """Samples of the global batch that begins at `position`."""
        return self._levels[self._next_level(self._first(position)) - 1][1]

    def samples(self, position: int) -> np.ndarray:
        """int64[size]: the numbers of its samples, in order."""
        import numpy as np

        runs = list(self._runs(position, self.size(position)))
        return np.concatenate([np.arange(first, stop, dtype=np.int64) for first, stop in runs])

    def after(self, position: int, batches: int = 1) -> int:
        """The position after so many batches from `position` on. A run's step s, counted from 0, begins at after(0, s).

        Takes as long as there are sizes and skipped ranges, however many batches.
        """
        position = self._first(position)
        while batches and (level := self._next_level(position)) < len(self._levels):
            size, end = self.size(position), self._levels[level][0]
            alike = min(batches, -(-(self.trained(end) - self.trained(position)) // size))
            position, batches = self._advance(position, alike * size), batches - alike
        return self._advance(position, batches * self.global_batch_size)

    def trained(self, position: int) -> int:
        """Samples that batches before `position` hold: those skipped do not count."""
        return position - sum(min(stop, position) - min(first, position) for first, stop in self.skipped)

    def skipping(self, ranges: Iterable[Sequence[int]]) -> BatchSchedule:
        """The same, without the samples of these ranges either."""
        merged: list[Range] = []
        for first, stop in sorted((int(first), int(stop)) for first, stop in (*self.skipped, *ranges)):
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(stop, merged[-1][1])
            else:
                merged.append((first, stop))
        return replace(self, skipped=tuple(merged))

    @cached_property
    def _levels(self) -> list[tuple[int, int]]:
        """Each size with the position from which it holds. In integers: no rounding decides at a boundary."""
        start, increment, samples = self.ramp or (self.global_batch_size, 1, 0)
        sizes = range(start, self.global_batch_size + 1, increment)
        return [(-(-n * samples // max(len(sizes) - 1, 1)), size) for n, size in enumerate(sizes)]

    def _next_level(self, position: int) -> int:
        """The index of the size that the batch will grow to next."""
        return bisect_right(self._levels, position, key=itemgetter(0))

    def _first(self, position: int) -> int:
        """The first sample from `position` on that is not skipped."""
        return next((stop for first, stop in self.skipped if first <= position < stop), position)

    def _runs(self, position: int, count: int) -> Iterator[Range]:
        """`count` samples from `position` on, as ranges without a skipped sample."""
        position = self._first(position)
        for first, stop in self.skipped:
            if first < position:
                continue
            if position + count <= first:
                break
            yield position, first
            count, position = count - (first - position), stop
        yield position, position + count

    def _advance(self, position: int, count: int) -> int:
        *_, (_, stop) = self._runs(position, count)
        return self._first(stop)


def batch_schedule(global_batch_size: int, ramp: Sequence[int] | None) -> BatchSchedule:
    """The schedule of data.global_batch_size and data.batch_ramp. Raises ConfigError for a ramp that does not end."""
    if ramp is None:
        return BatchSchedule(global_batch_size)
    key, form = f"data.batch_ramp={list(ramp)}", "[first size, increment, samples]"
    if len(ramp) != 3 or min(ramp) < 1:
        raise ConfigError(f"{key} must be {form}, each at least 1, or null")
    start, increment, samples = ramp
    if (growth := global_batch_size - start) < 0 or growth % increment:
        small = start < global_batch_size
        fix = f"an increment that divides {growth}, e.g. {math.gcd(growth, increment)}" if small else "a smaller start"
        raise ConfigError(
            f"{key} does not reach data.global_batch_size={global_batch_size} from {start} in steps of {increment}; "
            f"take {fix}"
        )
    return BatchSchedule(global_batch_size, (start, increment, samples))
