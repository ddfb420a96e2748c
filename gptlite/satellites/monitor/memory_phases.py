"""Peak memory of each phase of a training step, including model state, activations and all other allocations."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

PHASES: tuple[str, ...] = ("forward", "backward", "update")
AFTER: str = ""  # pseudo-phase after the step


class Phases:
    """Start times of a step's phases. Each micro-batch begins at least one forward and one backward phase. On a
    GPU, each start resets the allocator's peak statistics."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[int, str]] = []  # nanoseconds since 1970, the phase that begins
        self._peaks = dict.fromkeys((*PHASES, AFTER), 0)  # bytes; set only on a GPU

    def begin(self, phase: str) -> None:
        """Mark the start of a phase."""
        if self._device.type == "cuda":
            self._settle()
            torch.cuda.reset_peak_memory_stats(self._device)
        self._marks.append((time.time_ns(), phase))

    def highest(self) -> int:
        """Return the peak bytes allocated on a GPU since the first phase began."""
        self._settle()
        return max(self._peaks.values())

    def peaks(self, allocations: Iterable[tuple[int, int, int]], base: int) -> dict[str, int]:
        """Return the peak bytes of each phase. On a CPU they are computed from `allocations` (see
        recorded_allocations), which are added to the `base` bytes allocated before."""
        if self._device.type == "cuda":
            self._settle()
            return {phase: self._peaks[phase] for phase in PHASES}
        return phase_peaks(allocations, self._marks, base)

    def _settle(self) -> None:
        if self._marks:
            phase = self._marks[-1][1]
            self._peaks[phase] = max(self._peaks[phase], torch.cuda.max_memory_allocated(self._device))


def phase_peaks(allocations: Iterable[tuple[int, int, int]], marks: list[tuple[int, str]], base: int) -> dict[str, int]:
    """Return the peak bytes of each phase. They include the `base` bytes, allocations that are alive when the phase
    begins, and allocations made during it."""
    live: dict[int, int] = {}
    peaks = dict.fromkeys((*PHASES, AFTER), 0)
    now, at, phase = base, 0, AFTER
    for when, address, size in sorted(allocations, key=lambda each: each[0]):
        while at < len(marks) and marks[at][0] <= when:
            phase, at = marks[at][1], at + 1
            peaks[phase] = max(peaks[phase], now)
        now -= live.pop(address, 0)  # freed now, or earlier without a record if the address is being reused
        if size > 0:
            live[address] = size
            now += size
        peaks[phase] = max(peaks[phase], now)
    for _, phase in marks[at:]:
        peaks[phase] = max(peaks[phase], now)
    return {phase: peaks[phase] for phase in PHASES}
