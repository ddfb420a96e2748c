"""Timing of calls on a device. Calls of the tasks alternate, on buffers that are no longer in the caches."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

from gptlite.torch_private.benchmarks import busy_gpu

WARM_UP = 3
SPIN_HZ = 2e9  # cycles per second of torch.cuda._sleep, about the clock rate of a GPU
MOST_SPIN = 0.05  # longest time in seconds for which the stream is kept busy


@dataclass(frozen=True)
class Task:
    """Task to time: `call` on the result of `before`, for each set of buffers. `before` is not timed."""

    call: Callable[[Any], Any]
    before: Callable[[Any], Any] = lambda buffers: buffers


# Function that runs a task's calls and returns their total seconds. Its first argument is the task's name.
Clock = Callable[[str, Iterable[Callable[[], Any]]], float]


def host_clock(name: str, calls: Iterable[Callable[[], Any]]) -> float:
    """Time calls on a CPU, whose ops are complete when they return."""
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start


@dataclass
class EventClock:
    """GPU clock: the time between two events on the stream.

    The stream is kept busy until the host has issued the calls. Otherwise gaps between small kernels would be counted.
    """

    # Seconds that the host needed to issue a task's calls last time, by task name.
    issuing: dict[str, float] = field(default_factory=dict)

    def __call__(self, name: str, calls: Iterable[Callable[[], Any]]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        busy_gpu(int(min(MOST_SPIN, 1.5 * self.issuing.get(name, 0.0)) * SPIN_HZ))
        began = time.perf_counter()
        start.record()
        for call in calls:
            call()
        end.record()
        self.issuing[name] = time.perf_counter() - began
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def clock_of(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return EventClock() if device.type == "cuda" else host_clock


def measure(tasks: dict[str, Task], sets: Sequence[Any], repeats: int, clock: Clock) -> dict[str, float]:
    """Return the median seconds of a call of each task, over rounds that use every set of buffers.

    The tasks alternate, so that drift of the machine's speed affects all of them equally.
    """
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for repeat in range(WARM_UP + repeats):
        for name, task in tasks.items():
            ready = [task.before(buffers) for buffers in sets]
            seconds = clock(name, [partial(task.call, each) for each in ready])
            del ready  # frees its memory before the next task allocates
            if repeat >= WARM_UP:
                times[name].append(seconds / len(sets))
    return {name: median(each) for name, each in times.items()}
