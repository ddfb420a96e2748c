"""What a process does in test_infinite_memory.py: it trains under a limit on its own memory."""

from __future__ import annotations

import json
import resource
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

from distributed.cells.steps import built
from gptlite.config import load
from gptlite.satellites.nvme.infinite import InfiniteStream

MIB = 2**20


def status(field: str) -> int:
    """Bytes of a field of this process's status, such as VmData or RssAnon."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[field].split()[0]) * 1024


@contextmanager
def watched(found: Callable[[int], None]):
    """Looks at the memory of this process's own every few milliseconds, and gives the most of it above the start's."""
    stop, start, most = threading.Event(), status("RssAnon"), 0

    def look() -> None:
        nonlocal most
        while not stop.wait(0.005):
            most = max(most, status("RssAnon") - start)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        found(most)


def main(room_mib: int, steps: int, overrides: list[str]) -> None:
    """Takes steps with so much room for data beyond what torch takes, 0: any, and prints what was seen as JSON."""
    threading.stack_size(256 * 1024)
    torch.set_num_threads(1)
    with built(load([*overrides, "model.num_layers=2", "model.d_model=32"])) as (_, state, step):
        step(state)  # what is imported and started once
    if room_mib:
        limit = status("VmData") + room_mib * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    seen: dict[str, object] = {}
    with watched(lambda most: seen.update(most=most)), built(load(overrides)) as (_, state, step):
        seen["parameters"] = sum(4 * each.numel() for part in state.parts for each in part.parameters())
        stream = getattr(state.optimizer, "stream", None)
        if isinstance(stream, InfiniteStream):
            seen["buffers"] = [sum(each.nbytes for each in stream.resident()), len(stream.parameters.buffers[0])]
        seen["losses"] = [step(state).loss for _ in range(steps)]
    print(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
