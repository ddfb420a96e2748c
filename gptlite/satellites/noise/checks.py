"""Refusals of runs in which the noise of gradients cannot be measured. Does not import torch."""

from __future__ import annotations

from gptlite.config.schema import Config
from gptlite.errors import ConfigError
from gptlite.optimizer.config import SGDConfig
from gptlite.parallelism.config import Offload
from gptlite.parallelism.layout import divisors, listed, runs_batch, splits_backward


def wanted_by(config: Config) -> str | None:
    """Return the key for which a run estimates the noise of its gradients, with its value; None if it does not."""
    if isinstance(config.optimizer, SGDConfig) and config.optimizer.adascale:
        return "optimizer.adascale=true"
    return "trainer.noise_scale=true" if config.trainer.noise_scale else None


def check_noise(config: Config) -> None:
    """Raise ConfigError if the noise is wanted and the layout or the batch does not allow to measure it."""
    _check_base(config)
    if (key := wanted_by(config)) is None:
        return
    layout = config.parallelism
    if layout.context > 1:
        raise ConfigError(f"{key} compares the gradients of different samples, which the ranks of parallelism.context="
                          f"{layout.context} share; use parallelism.context=1, or {_without(key)}")  # fmt: skip
    if layout.expert > 1:
        raise ConfigError(f"{key} compares the gradients of ranks, and with parallelism.expert={layout.expert} a rank "
                          f"computes some for others; use parallelism.expert=1, or {_without(key)}")  # fmt: skip
    if layout.data is not None:
        check_groups(config, layout.data, None)


def check_groups(config: Config, data_size: int, micro_batch_size: int | None) -> None:
    """Raise ConfigError if each step has only one gradient, or several that cannot be told apart, on `data_size` data
    ranks and with micro-batches of `micro_batch_size` samples; None: data.micro_batch_size, if that is set."""
    key, layout, batch = wanted_by(config), config.parallelism, config.data.global_batch_size
    if key is None or data_size > 1:
        return
    if layout.offload is not Offload.none:
        raise ConfigError(f"{key} with parallelism.offload={layout.offload.value} compares the gradients of data "
                          f"ranks; use several, parallelism.offload=none, or {_without(key)}")  # fmt: skip
    if splits_backward(layout):
        raise ConfigError(
            f"{key} on one data rank reads gradients in whole backward passes, which parallelism.schedule="
            f"{layout.schedule} splits; use parallelism.schedule=1f1b or interleaved_1f1b, or {_without(key)}"
        )
    micro = micro_batch_size or config.data.micro_batch_size
    if config.data.handed_over or micro is None or batch // micro > 1:
        return
    sizes = [size for size in divisors(batch)[:-1] if runs_batch(layout, batch, size, 1)]
    fix = f"data.micro_batch_size={listed(sizes[-3:], 'or')}, " if sizes else ""
    raise ConfigError(
        f"{key} compares the gradients of several ranks or micro-batches, but data.global_batch_size={batch} is one "
        f"micro-batch on one data rank; use {fix}more ranks, or {_without(key)}"
    )


def _check_base(config: Config) -> None:
    """Raise ConfigError for a base batch that is not one, or has more samples than the batch."""
    optimizer, batch = config.optimizer, config.data.global_batch_size
    if not isinstance(optimizer, SGDConfig) or (base := optimizer.adascale_base) is None:
        return
    if not optimizer.adascale:
        raise ConfigError(f"optimizer.adascale_base={base} has no effect without optimizer.adascale=true; set that, or "
                          "optimizer.adascale_base=null")  # fmt: skip
    if not 1 <= base <= batch and not config.data.handed_over:
        raise ConfigError(f"optimizer.adascale_base={base} must be from 1 to data.global_batch_size={batch}, since the "
                          "gain is of a larger batch; lower it, or raise data.global_batch_size")  # fmt: skip


def _without(key: str) -> str:
    return key.replace("true", "false")
