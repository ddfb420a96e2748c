"""torch.profiler's recorder of allocations, without its operators."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import _autograd
from torch._C._profiler import RecordScope, _EventType

autograd: Any = _autograd  # its type stub is incomplete


@contextmanager
def recorded_allocations() -> Iterator[list[tuple[int, int, int]]]:
    """Context manager that records this thread's CPU tensor allocations, in order. The yielded list is filled on exit.

    Entries are (nanoseconds since 1970, address, bytes), with negative bytes for frees. Frees of memory
    allocated before the recording are left out. The recorder is torch.profiler's, without operators. It costs about 10
    us per allocation, and must not be running already: see `dispatch.profiler_runs`.
    """
    allocations: list[tuple[int, int, int]] = []
    settings: Any = torch.autograd.profiler.profile(use_cpu=True, use_kineto=True, profile_memory=True)
    older = torch.empty(1)
    with _silent_stderr():
        autograd._prepare_profiler(settings.config(), settings.kineto_activities)
        autograd._enable_profiler(settings.config(), settings.kineto_activities, {RecordScope.STATIC_RUNTIME_MODEL})
        del older  # the first free of unrecorded memory logs a warning, the next 999 do not
    try:
        yield allocations
    finally:
        with _silent_stderr():
            events: Any = autograd._disable_profiler().experimental_event_tree()
        begun: set[int] = set()
        for event in events:
            if event.tag != _EventType.Allocation:
                continue
            address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
            # Skip frees of memory that was allocated before recording began, such as `older`.
            if size > 0 or address in begun:
                (begun.add if size > 0 else begun.remove)(address)
                allocations.append((event.start_time_ns, address, size))


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Redirect the process's stderr to /dev/null, as torch 2.13's recorder logs its start and stop there."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
