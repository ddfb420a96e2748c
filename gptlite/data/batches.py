"""Global batches: sizes and sample numbers, as pure functions of the position at which a batch begins."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING

from gptlite.errors import ConfigError
from gptlite.limits import RAMP_SIZES

if TYPE_CHECKING:
    import numpy as np

Range = tuple[int, int]  # half-open range of sample numbers: [first, stop)


@dataclass(frozen=True)
class BatchSchedule:
    """Division of the run's infinite sample stream, numbered 0, 1, ..., into global batches.

    A position in the stream is the number of the next sample, like `consumed_samples` of a checkpoint. Batches are
    contiguous except for the `skipped` ranges, which no batch reads. `skipping` keeps these ranges sorted and
    disjoint.

    `ramp` is (start, increment, samples), as in Megatron's --rampup-batch-size: the size begins at `start` and grows by
    `increment` at equal intervals, (global_batch_size - start) / increment times, until position `samples`. With
    (start, increment), it has changed only where `grown` says, by what the run has measured: (position, size from there
    on), ascending. The sizes of later batches are then not known, and taken for the last.
    """

    global_batch_size: int
    ramp: tuple[int, ...] | None = None
    skipped: tuple[Range, ...] = ()
    grown: tuple[tuple[int, int], ...] = ()

    @property
    def measured(self) -> bool:
        """True if the ramp follows what the run measures."""
        return self.ramp is not None and len(self.ramp) == 2

    def sizes(self) -> list[int]:
        """Return every size that a global batch can have, smallest first."""
        start, increment, *_ = self.ramp or (self.global_batch_size, 1)
        return list(range(start, self.global_batch_size + 1, increment))

    def size(self, position: int) -> int:
        """Return the number of samples in the global batch that begins at `position`."""
        return self._levels[self._next_level(self._first(position)) - 1][1]

    def samples(self, position: int) -> np.ndarray:
        """Return the sample numbers of the global batch that begins at `position`, in order: int64[size]."""
        import numpy as np

        runs = list(self._runs(position, self.size(position)))
        return np.concatenate([np.arange(first, stop, dtype=np.int64) for first, stop in runs])

    def after(self, position: int, batches: int = 1) -> int:
        """Return the position after `batches` batches from `position` on. Step s (from 0) begins at after(0, s).

        The cost grows with the number of sizes and skipped ranges, not with the number of batches.
        """
        position = self._first(position)
        while batches and (level := self._next_level(position)) < len(self._levels):
            size, end = self.size(position), self._levels[level][0]
            # All batches that begin before `end`, from which the next size applies, have this size.
            alike = min(batches, -(-(self.trained(end) - self.trained(position)) // size))
            position, batches = self._advance(position, alike * size), batches - alike
        return self._advance(position, batches * self._levels[-1][1])

    def batches(self, samples: int) -> int:
        """Return the smallest number of batches, from the start of the run, that read at least `samples` samples."""
        return bisect_left(range(samples), samples, key=lambda count: self.trained(self.after(0, count)))

    def trained(self, position: int) -> int:
        """Return the number of samples in the batches before `position`, without skipped samples."""
        return position - sum(min(stop, position) - min(first, position) for first, stop in self.skipped)

    def skipping(self, ranges: Iterable[Sequence[int]]) -> BatchSchedule:
        """Return a copy of the schedule that also skips `ranges`."""
        merged: list[Range] = []
        for first, stop in sorted((int(first), int(stop)) for first, stop in (*self.skipped, *ranges)):
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(stop, merged[-1][1])
            else:
                merged.append((first, stop))
        return replace(self, skipped=tuple(merged))

    @cached_property
    def _levels(self) -> list[tuple[int, int]]:
        """(position from which a size applies, size), ascending. Integer arithmetic avoids floating-point errors."""
        sizes = self.sizes()
        if self.measured:
            return [(0, sizes[0]), *self.grown]
        samples = self.ramp[2] if self.ramp else 0
        return [(-(-n * samples // max(len(sizes) - 1, 1)), size) for n, size in enumerate(sizes)]

    def _next_level(self, position: int) -> int:
        """Return the index in `_levels` of the size after the one at `position`."""
        return bisect_right(self._levels, position, key=itemgetter(0))

    def _first(self, position: int) -> int:
        """Return the first sample from `position` on that is not skipped."""
        return next((stop for first, stop in self.skipped if first <= position < stop), position)

    def _runs(self, position: int, count: int) -> Iterator[Range]:
        """Yield the ranges of the next `count` samples from `position` on that are not skipped."""
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
    """Return the schedule of data.global_batch_size and data.batch_ramp.

    Raises ConfigError for a ramp that does not reach the global batch size.
    """
    if ramp is None:
        return BatchSchedule(global_batch_size)
    key, form = f"data.batch_ramp={list(ramp)}", "[first size, increment, samples]"
    if len(ramp) not in (2, 3) or min(ramp) < 1:
        raise ConfigError(f"{key} must be {form}, or [first size, increment] to follow the gradient noise scale, each "
                          "at least 1, or null")  # fmt: skip
    start, increment = ramp[:2]
    if (growth := global_batch_size - start) < 0 or growth % increment:
        small = start < global_batch_size
        fix = f"an increment that divides {growth}, e.g. {math.gcd(growth, increment)}" if small else "a smaller start"
        raise ConfigError(
            f"{key} does not reach data.global_batch_size={global_batch_size} from {start} in steps of {increment}; "
            f"take {fix}"
        )
    if (sizes := growth // increment + 1) > RAMP_SIZES:
        raise ConfigError(f"{key} has {sizes:,} sizes, more than {RAMP_SIZES:,}; give a larger increment")
    return BatchSchedule(global_batch_size, tuple(ramp))
