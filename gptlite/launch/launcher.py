"""Start of a run: a single rank in this process, several ranks in separate processes."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gptlite.config import Config, with_vocabulary
from gptlite.config.batch import check_world
from gptlite.config.checks import check_device
from gptlite.config.warm_start import refuse_larger_vocabulary
from gptlite.data.config import SyntheticConfig, TokensConfig
from gptlite.data.vocabulary import find_vocabulary
from gptlite.errors import ConfigError
from gptlite.launch.host_memory import lift, limit, limit_words, out_of_memory
from gptlite.launch.offload_space import check_offload_space
from gptlite.launch.starter import Starter, is_main, starter
from gptlite.parallelism.layout import wanted_world
from gptlite.progress import working

if TYPE_CHECKING:
    from gptlite.launch.elastic import Ended
    from gptlite.run.result import Result
    from gptlite.trainer.signals import StopSignal

# glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
KEEP_ALL = 2**31 - 1
DEFAULT_MMAP_MAX, DEFAULT_TRIM_THRESHOLD = 65536, 128 * 1024


def launch(config: Config, started: float) -> int:
    """Run the configuration and return the exit code. Raises ConfigError, before it writes anything, for a refusal.

    `started` is the start of the command in time.monotonic() seconds, from which `trainer.max_time` counts. Under
    torchrun or srun this process is one of their ranks; otherwise it starts as many ranks as the layout requires.
    """
    keep_freed_memory()  # before parallelism=auto creates tensors; ranks started here inherit the environment variable
    outer = starter()
    with working("starting", print if is_main() else lambda _: None):  # imports torch, and checks the memory
        config, world = planned(config, outer)
    if world == 1:
        from gptlite.trainer.signals import StopSignal

        try:
            return alone(config, started, StopSignal()).exit_code
        except Exception as error:
            if not (reason := out_of_memory(error)):
                raise
            lift()  # the report needs memory
            return ran_out(reason, config, 1)
    if outer:
        from gptlite.launch.worker import under
        from gptlite.pretrain import pretrain

        return under(outer, config, started, pretrain).exit_code
    return start_ranks(config, world, started).exit_code


def alone(config: Config, started: float, stop: StopSignal | None) -> Result:
    """Train in this process. The memory limit remains set after an error, for `out_of_memory`."""
    from gptlite.parallelism.process_group import leave
    from gptlite.parallelism.torch_private import forget_meshes
    from gptlite.pretrain import pretrain

    limit(config.trainer.host_memory_limit)
    try:
        return pretrain(config, started, stop)
    finally:
        leave()  # the group of one rank that offloads
        forget_meshes()


def ran_out(reason: str, config: Config, world: int) -> int:
    """Print that this rank ran out of memory, with overrides that need less memory, and return the exit code."""
    from gptlite.plan.advice import advice_lines

    limited = limit_words(config.trainer.host_memory_limit)
    print(f"error: {reason}{limited}", *advice_lines(config, world), sep="\n", file=sys.stderr, flush=True)
    return 1


def planned(config: Config, outer: Starter | None, ranks: int | None = None) -> tuple[Config, int]:
    """Return the configuration with its layout resolved, and the number of ranks.

    By default the layout determines the number of ranks; `outer` or `ranks` overrides it. Raises ConfigError if the
    configuration cannot run here.
    """
    import torch

    gpus = torch.cuda.device_count()
    if isinstance(config.data, TokensConfig | SyntheticConfig):  # the vocabulary of other data is determined later
        vocabulary = find_vocabulary(config.data)
        if not vocabulary.assumed:
            refuse_larger_vocabulary(config, vocabulary.size)
            with_vocabulary(config, vocabulary.size)
    if config.parallelism.auto:
        from gptlite.plan.planning import chosen

        config = chosen(config, outer.world_size if outer else ranks, print if is_main() else lambda _: None)
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
    check_offload_space(config, layout, here)
    if not gpus:  # on a GPU, a failed allocation raises an error at once
        from gptlite.run.memory import refuse_too_large

        refuse_too_large(config, layout, here)
    return config, world


def start_ranks(config: Config, world: int, started: float) -> Ended:
    """Run the configuration in new processes, even for one rank. Raises ConfigError if a rank refuses it."""
    import torch

    from gptlite.launch.elastic import rank_ending
    from gptlite.ops.select import select_ops

    # Raises before a rank starts if an op cannot run. Also compiles the kernels once, not in every rank.
    device = torch.device("cuda" if torch.cuda.device_count() else "cpu")
    select_ops(config.ops, device, documents=config.data.documents)
    return rank_ending(config, world, started)


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
