"""Starting the ranks of a run. One rank runs in this process."""

import ctypes
import os
import sys

from gptlite.config import Config
from gptlite.errors import ConfigError

# glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
KEEP_ALL = 2**31 - 1


def launch(config: Config, started: float) -> int:
    """Runs the configuration and returns the exit code. Raises ConfigError before anything is written.

    `started` is when the command began, in time.monotonic() seconds: `trainer.max_time` counts from there.
    """
    for name, starter in (("WORLD_SIZE", "torchrun"), ("SLURM_NTASKS", "srun")):
        ranks = os.environ.get(name, "")
        if ranks.isdigit() and int(ranks) > 1 and (name != "SLURM_NTASKS" or "SLURM_STEP_ID" in os.environ):
            raise ConfigError(f"{name}={ranks}: this version runs one device; start it once, without {starter}")
    keep_freed_memory()
    from gptlite.pretrain import pretrain

    return pretrain(config, started)


def keep_freed_memory() -> None:
    """Makes glibc's malloc keep freed memory instead of returning it to the kernel.

    A training step on a CPU frees and allocates the same gigabytes again; by default each large tensor is mapped anew,
    and the page faults take up to half the step (measured in docs/benchmarks.md). Elsewhere this does nothing.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another libc, which has its own ways
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, KEEP_ALL)
