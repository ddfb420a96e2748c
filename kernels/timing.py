"""Seconds that calls take on a device, in turn, each on buffers that the caches have forgotten."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

WARM_UP = 3
SPIN_HZ = 2e9  # cycles of torch.cuda._sleep a second: about a GPU's clock
MOST_SPIN = 0.05  # seconds


@dataclass(frozen=True)
class Task:
    """`call` is timed, on what `before` makes of each set of buffers, which is not."""

    call: Callable[[Any], Any]
    before: Callable[[Any], Any] = lambda buffers: buffers


# Seconds that all of some calls take; the name is the task's.
Clock = Callable[[str, Iterable[Callable[[], Any]]], float]


def host_clock(name: str, calls: Iterable[Callable[[], Any]]) -> float:
    """For a CPU, whose ops are done when they return."""
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start


@dataclass
class EventClock:
    """For a GPU: the time between two events on its stream.

    The stream is kept busy until the host has issued the calls, or the gaps between small kernels would be counted.
    """

    issuing: dict[str, float] = field(default_factory=dict)  # seconds that the host took the last time

    def __call__(self, name: str, calls: Iterable[Callable[[], Any]]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(min(MOST_SPIN, 1.5 * self.issuing.get(name, 0.0)) * SPIN_HZ))
        began = time.perf_counter()
        start.record()
        for call in calls:
            call()
        end.record()
        self.issuing[name] = time.perf_counter() - began
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return EventClock() if device.type == "cuda" else host_clock


def measure(tasks: dict[str, Task], sets: Sequence[Any], repeats: int, clock: Clock) -> dict[str, float]:
    """Median seconds of a call of each task, over rounds that visit every set of buffers.

    The tasks take turns, so that a drift of the machine's speed meets all alike.
    """
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for repeat in range(WARM_UP + repeats):
        for name, task in tasks.items():
            ready = [task.before(buffers) for buffers in sets]
            seconds = clock(name, [partial(task.call, each) for each in ready])
            del ready  # before the next task makes its own
            if repeat >= WARM_UP:
                times[name].append(seconds / len(sets))
    return {name: median(each) for name, each in times.items()}
