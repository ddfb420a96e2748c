"""The most memory that each phase of a training step takes: model state, activations and all else together."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

PHASES: tuple[str, ...] = ("forward", "backward", "update")
AFTER: str = ""  # the step is over


class Phases:
    """When a step's phases begin; several micro-batches' take turns. On a GPU each begins the allocator's peak anew."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[int, str]] = []  # nanoseconds since 1970, the phase that begins
        self._peaks = dict.fromkeys((*PHASES, AFTER), 0)  # a GPU's

    def begin(self, phase: str) -> None:
        """From now on it is this phase."""
        if self._device.type == "cuda":
            self._settle()
            torch.cuda.reset_peak_memory_stats(self._device)
        self._marks.append((time.time_ns(), phase))

    def highest(self) -> int:
        """The most that a GPU has held since the first phase began."""
        self._settle()
        return max(self._peaks.values())

    def peaks(self, allocations: Iterable[tuple[int, int, int]], base: int) -> dict[str, int]:
        """The most bytes in each phase. On a CPU of `allocations`, as recorded_allocations has them, beside `base`."""
        if self._device.type == "cuda":
            self._settle()
            return {phase: self._peaks[phase] for phase in PHASES}
        return phase_peaks(allocations, self._marks, base)

    def _settle(self) -> None:
        if self._marks:
            phase = self._marks[-1][1]
            self._peaks[phase] = max(self._peaks[phase], torch.cuda.max_memory_allocated(self._device))


def phase_peaks(allocations: Iterable[tuple[int, int, int]], marks: list[tuple[int, str]], base: int) -> dict[str, int]:
    """The most bytes at once in each phase: what lives when it begins, and every allocation in it."""
    live: dict[int, int] = {}
    peaks = dict.fromkeys((*PHASES, AFTER), 0)
    now, at, phase = base, 0, AFTER
    for when, address, size in sorted(allocations, key=lambda each: each[0]):
        while at < len(marks) and marks[at][0] <= when:
            phase, at = marks[at][1], at + 1
            peaks[phase] = max(peaks[phase], now)
        now -= live.pop(address, 0)  # given back, or so without having been seen: the address is given out again
        if size > 0:
            live[address] = size
            now += size
        peaks[phase] = max(peaks[phase], now)
    for _, phase in marks[at:]:
        peaks[phase] = max(peaks[phase], now)
    return {phase: peaks[phase] for phase in PHASES}
