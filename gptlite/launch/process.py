"""Settings of a process that trains: its allocator, threads and environment; and its report if memory runs out."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from gptlite.config.schema import Config
from gptlite.launch.host_memory import limit_words

# glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
KEEP_ALL = 2**31 - 1
DEFAULT_MMAP_MAX, DEFAULT_TRIM_THRESHOLD = 65536, 128 * 1024


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory instead of returning it to the kernel.

    A training step on a CPU frees and allocates the same gigabytes again. By default each large tensor is a new
    mapping, and the page faults take up to half the step (docs/benchmarks_training.md). Tensors of 2 MiB and more use
    huge pages, unless the environment disables them. torch has no other setting for this than an environment variable,
    which it reads once. On platforms other than Linux this function does nothing.
    """
    if sys.platform == "linux":
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        _set_malloc(0, KEEP_ALL)  # no block is a mapping, as free would unmap it


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Context that keeps freed memory until its end, for a process that does more than train."""
    _set_malloc(0, KEEP_ALL)
    try:
        yield
    finally:
        if libc := _set_malloc(DEFAULT_MMAP_MAX, DEFAULT_TRIM_THRESHOLD):
            libc.malloc_trim(0)


@contextmanager
def environment_restored() -> Iterator[None]:
    """Context that restores the environment at its end. A single rank with offload sets gloo's interface there."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _set_malloc(mmap_max: int, trim_threshold: int) -> ctypes.CDLL | None:
    """Set two parameters of glibc's malloc, and return glibc; None with another C library."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_MAX, mmap_max)
        libc.mallopt(M_TRIM_THRESHOLD, trim_threshold)
    except (OSError, AttributeError):
        return None
    return libc


def share_cores(ranks: int) -> None:
    """Limit torch's threads to 1 / `ranks` of the cores, unless the environment or Slurm sets them."""
    import torch

    # torch counts only the cores to which Slurm has bound the rank.
    bound = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)
    if "OMP_NUM_THREADS" not in os.environ and not (bound and "SLURM_STEP_ID" in os.environ):
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))


def ran_out(reason: str, config: Config, advice: Iterable[str] = ()) -> int:
    """Print that this rank ran out of memory, and lines of advice, and return the exit code."""
    limited = limit_words(config.trainer.host_memory_limit)
    print(f"error: {reason}{limited}", *advice, sep="\n", file=sys.stderr, flush=True)
    return 1
