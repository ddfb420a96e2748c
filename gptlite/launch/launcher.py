"""Start of a run: a single rank in this process, several ranks in separate processes."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gptlite.config.batch import check_world
from gptlite.config.checks import check_device
from gptlite.config.schema import Config
from gptlite.config.vocabulary import refuse_larger_vocabulary, with_vocabulary
from gptlite.data.vocabulary import find_vocabulary
from gptlite.errors import ConfigError
from gptlite.launch.host_memory import limit, limit_words
from gptlite.launch.room import check_disk, check_memory
from gptlite.launch.starter import Starter
from gptlite.models.spec import spec_of
from gptlite.parallelism.layout import wanted_world

if TYPE_CHECKING:
    from gptlite.launch.elastic import Ended
    from gptlite.run.result import Result
    from gptlite.trainer.signals import StopSignal

# glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
KEEP_ALL = 2**31 - 1
DEFAULT_MMAP_MAX, DEFAULT_TRIM_THRESHOLD = 65536, 128 * 1024


def alone(config: Config, started: float, stop: StopSignal | None, memory: str = "") -> Result:
    """Train in this process. The memory limit remains set after an error, for `out_of_memory`. `memory`: see
    `pretrain`."""
    from gptlite.parallelism.process_group import leave
    from gptlite.parallelism.torch_private import forget_meshes
    from gptlite.pretrain import pretrain

    limit(config.trainer.host_memory_limit)
    try:
        return pretrain(config, started, stop, memory=memory)
    finally:
        leave()  # the group of one rank that offloads
        forget_meshes()


def ran_out(reason: str, config: Config, advice: Iterable[str] = ()) -> int:
    """Print that this rank ran out of memory, and lines of advice, and return the exit code."""
    limited = limit_words(config.trainer.host_memory_limit)
    print(f"error: {reason}{limited}", *advice, sep="\n", file=sys.stderr, flush=True)
    return 1


def check_here(config: Config, outer: Starter | None, ranks: int | None = None) -> int:
    """Return the number of ranks of a run. By default the layout determines it; `outer` or `ranks` overrides it.

    Raises ConfigError if the configuration cannot run here.
    """
    import torch

    gpus, sized = torch.cuda.device_count(), with_known_vocabulary(config)
    world = outer.world_size if outer else ranks or wanted_world(config.parallelism, gpus)
    layout = check_world(config, world)
    check_device(config, "cuda" if gpus else "cpu")
    here = outer.local_world_size if outer else world
    # srun may make only its own GPU visible to each rank.
    if gpus and here > gpus and not (outer and outer.name == "srun" and gpus == 1):
        raise ConfigError(
            f"the layout has {here} ranks on this machine, which has {gpus} GPU{'s' * (gpus > 1)}; lower the degrees "
            f"in parallelism.*, or set CUDA_VISIBLE_DEVICES= for ranks on the CPU"
        )
    check_disk(sized, layout, here)
    if not gpus:  # on a GPU, a failed allocation raises an error at once
        check_memory(sized, layout, here)
    return world


def with_known_vocabulary(config: Config) -> Config:
    """Return the configuration with a vocabulary size, which is a guess if the data's tokenizer is not known yet.

    Raises ConfigError if the tokenizer is known and its vocabulary does not fit the model.
    """
    if config.data.unit != "tokens":
        return config
    found = find_vocabulary(config.data, lambda _: None)
    if not found.assumed:
        refuse_larger_vocabulary(config, found.size)
    elif spec_of(config.model).vocab_size(config.model) is not None:
        return config
    return with_vocabulary(config, found.size)


def start_ranks(
    config: Config, world: int, started: float, memory: str = "", advise: Callable[[], Iterable[str]] = tuple
) -> Ended:
    """Run the configuration in new processes, even for one rank. Raises ConfigError if a rank refuses it.

    `memory`: see `pretrain`. `advise()` returns lines that are printed if a rank runs out of memory.
    """
    import torch

    from gptlite.launch.elastic import rank_ending
    from gptlite.ops.select import select_ops

    # Raises before a rank starts if an op cannot run. Also compiles the kernels once, not in every rank.
    device = torch.device("cuda" if torch.cuda.device_count() else "cpu")
    select_ops(config.ops, device, documents=config.data.documents)
    return rank_ending(config, world, started, memory=memory, advise=advise)


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
