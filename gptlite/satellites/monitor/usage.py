"""Average memory and utilisation of this process's device."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Thread

import torch

from gptlite.satellites.monitor.process_memory import resident_bytes

SAMPLE_SECONDS = 0.1


@dataclass
class _Mean:
    """Running mean of the values that are not None."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total, self.count = self.total + value, self.count + 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


class Usage:
    """Sampler of memory and utilisation. A thread takes ten samples per second until `close`.

    Memory: on a GPU, bytes of live tensors, from the caching allocator; on a CPU, the resident set. Utilisation, from 0
    to 1: on a GPU, the fraction of time in which a kernel ran, from NVML; on a CPU, the processor time of this process
    divided by the time available to its threads; None if the system does not report it or nvidia-ml-py is missing.
    """

    def __init__(self, device: torch.device, seconds: float = SAMPLE_SECONDS) -> None:
        self._device, self._seconds = device, seconds
        self._means = _Mean(), _Mean()  # memory and utilisation since the last row, which may be hours ago
        self._rows: list[tuple[float, int | None, float | None]] = []  # seconds, memory, utilisation
        self._since = time.perf_counter(), time.process_time()
        self._ended = Event()
        Thread(target=self._watch, daemon=True, name="usage").start()

    def read(self) -> dict[str, float | None]:
        """Return the row keys `memory_average_bytes` and `utilization`, the means since the previous `read`."""
        (memory, used), self._means = self._means, (_Mean(), _Mean())  # the thread now adds to the new ones
        if not memory.count and not used.count:
            self._sample(memory, used)
        utilization = used.value
        (wall, busy), self._since = self._since, (time.perf_counter(), time.process_time())
        wall, busy = self._since[0] - wall, self._since[1] - busy
        if self._device.type != "cuda" and wall > 0:
            utilization = min(1.0, busy / (wall * torch.get_num_threads()))
        average = None if memory.value is None else round(memory.value)
        self._rows.append((wall, average, utilization))
        return {"memory_average_bytes": average, "utilization": utilization}

    @property
    def memory(self) -> int | None:
        """Average memory in bytes over all rows but the first, whose steps set up and compile; None if unknown."""
        found = self._over_rows(1)
        return None if found is None else round(found)

    @property
    def utilization(self) -> float | None:
        """Average utilisation, 0 to 1, over the same rows as `memory`; None if unknown."""
        return self._over_rows(2)

    def close(self) -> None:
        """Stop sampling; the averages stay available."""
        self._ended.set()

    def _over_rows(self, column: int) -> float | None:
        rows = self._rows[1:] or self._rows
        known = [(row[0], value) for row in rows if (value := row[column]) is not None]
        total = sum(seconds for seconds, _ in known)
        return sum(seconds * value for seconds, value in known) / total if total else None

    def _watch(self) -> None:
        while not self._ended.wait(self._seconds):
            self._sample(*self._means)

    def _sample(self, memory: _Mean, used: _Mean) -> None:
        if self._device.type == "cuda":
            memory.add(torch.cuda.memory_allocated(self._device))
            used.add(gpu_utilization(self._device))
        else:
            memory.add(resident_bytes()[0])


def gpu_utilization(device: torch.device) -> float | None:
    """Return NVML's utilisation, 0 to 1; None without nvidia-ml-py, or if the driver does not report it."""
    with suppress(Exception):  # ModuleNotFoundError, and NVML's exceptions
        return torch.cuda.utilization(device) / 100
    return None
