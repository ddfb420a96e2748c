"""Start of a run: a single rank in this process, several ranks in separate processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from gptlite.config.batch import check_world
from gptlite.config.checks import check_device
from gptlite.config.completed import refuse_larger_vocabulary, with_vocabulary
from gptlite.config.schema import Config
from gptlite.data.config import SyntheticConfig, TokensConfig
from gptlite.data.vocabulary import find_vocabulary
from gptlite.errors import ConfigError
from gptlite.launch.host_memory import limit
from gptlite.launch.room import check_disk, check_memory
from gptlite.launch.starter import Starter
from gptlite.models.registry import spec_of
from gptlite.parallelism.config import Offload
from gptlite.parallelism.layout import wanted_world
from gptlite.progress import counted

if TYPE_CHECKING:
    from gptlite.launch.elastic import Ended
    from gptlite.trainer.signals import StopSignal

T = TypeVar("T")


def alone(config: Config, started: float, stop: StopSignal | None, pretrain: Callable[..., T]) -> T:
    """Train in this process, and return the result of `pretrain`. The memory limit remains set after an error, for
    `out_of_memory`."""
    from gptlite.parallelism.process_group import leave_group
    from gptlite.torch_private.distributed import forget_meshes

    limit(config.trainer.host_memory_limit)
    try:
        return pretrain(config, started, stop)
    finally:
        leave_group()  # the group of one rank that offloads
        forget_meshes()


def check_here(config: Config, outer: Starter | None, ranks: int | None = None) -> int:
    """Return the number of ranks of a run. By default the layout determines it; `outer` or `ranks` overrides it.

    Raises ConfigError if the configuration cannot run here.
    """
    import torch

    gpus = torch.cuda.device_count()
    sized = with_known_vocabulary(config, guess=not gpus or config.parallelism.offload is Offload.nvme)
    world = outer.world_size if outer else ranks or wanted_world(config.parallelism, gpus)
    layout = check_world(sized, world)
    check_device(config, "cuda" if gpus else "cpu")
    here = outer.local_world_size if outer else world
    # srun may make only its own GPU visible to each rank.
    if gpus and here > gpus and not (outer and outer.name == "srun" and gpus == 1):
        raise ConfigError(
            f"the layout has {here} ranks on this machine, which has {counted(gpus, 'GPU')}; lower the "
            "degrees in parallelism.*, or set CUDA_VISIBLE_DEVICES= for ranks on the CPU"
        )
    check_disk(sized, layout, here)
    if not gpus:  # on a GPU, a failed allocation raises an error at once
        check_memory(sized, layout, here)
    return world


def with_known_vocabulary(config: Config, guess: bool) -> Config:
    """Return the configuration with the vocabulary size of prepared or synthetic data. With other data, whose text may
    have to be read for it, a size that is not set is a guess if `guess` is True, and is not needed otherwise.

    Raises ConfigError if the data's vocabulary does not fit the model.
    """
    prepared = isinstance(config.data, TokensConfig | SyntheticConfig)
    unset = config.data.unit == "tokens" and spec_of(config.model).vocab_size(config.model) is None
    if not prepared and not (unset and guess):
        return config
    vocabulary = find_vocabulary(config.data, lambda _: None)
    if vocabulary.assumed and not unset:
        return config
    if not vocabulary.assumed:
        refuse_larger_vocabulary(config, vocabulary.size)
    return with_vocabulary(config, vocabulary.size)


def start_ranks(
    config: Config,
    world: int,
    started: float,
    worker: tuple[str, ...],
    memory: str = "",
    advise: Callable[[], Iterable[str]] = tuple,
) -> Ended:
    """Run the configuration in new processes, even for one rank. Raises ConfigError if a rank refuses it.

    For the parameters, see `rank_ending`.
    """
    import torch

    from gptlite.launch.elastic import rank_ending
    from gptlite.ops.select import select_ops

    # Raises before a rank starts if an op cannot run. Also compiles the kernels once, not in every rank.
    device = torch.device("cuda" if torch.cuda.device_count() else "cpu")
    select_ops(config.ops, device, documents=config.data.documents)
    return rank_ending(config, world, started, worker, memory, advise)
