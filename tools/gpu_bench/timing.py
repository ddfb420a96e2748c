"""Times of calls on a device: CUDA events on a GPU, the host's clock on a CPU. Medians."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch


class Timer:
    """Seconds of calls on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, call: Callable[[], Any], repeats: int, warm_up: int = 3) -> float:
        """The median of single calls, one after the other without a wait between them."""
        for _ in range(warm_up):
            call()
        self.wait()
        if self.device.type != "cuda":
            return median(self._by_clock(call) for _ in range(repeats))
        pairs = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        self.wait()
        return median(begin.elapsed_time(end) for begin, end in pairs) / 1e3

    def wait(self) -> None:
        """Until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _by_clock(self, call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
