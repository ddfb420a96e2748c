"""Refusals of runs in which the noise of gradients cannot be measured. Does not import torch."""

from __future__ import annotations

import math

from gptlite.config.schema import Config
from gptlite.data.batches import batch_schedule
from gptlite.data.config import DataConfig
from gptlite.errors import ConfigError
from gptlite.optimizer.config import SGDConfig
from gptlite.parallelism.config import Compression, Offload
from gptlite.parallelism.layout import MAX_MICRO_BATCH, divisors, runs_batch, splits_backward
from gptlite.satellites.zeropp.check import OFF as ZEROPP_OFF
from gptlite.satellites.zeropp.check import options


def wanted_by(config: Config) -> str | None:
    """Return the key for which a run estimates the noise of its gradients, with its value; None if it does not."""
    if isinstance(config.optimizer, SGDConfig) and config.optimizer.adascale:
        return "optimizer.adascale=true"
    return "trainer.noise_scale=true" if config.trainer.noise_scale else None


def wanted(config: Config) -> bool:
    """Return True if a run estimates the noise of its gradients."""
    return wanted_by(config) is not None


def check_noise(config: Config) -> None:
    """Raise ConfigError if the noise is wanted and the layout or the batch does not allow to measure it."""
    _check_base(config)
    _check_ramp(config)
    if (key := wanted_by(config)) is None:
        return
    layout = config.parallelism
    if layout.context > 1:
        raise ConfigError(f"{key} compares the gradients of different samples, which the ranks of parallelism.context="
                          f"{layout.context} share; use parallelism.context=1, or {without(key)}")  # fmt: skip
    if layout.expert > 1:
        raise ConfigError(f"{key} compares the gradients of ranks, and with parallelism.expert={layout.expert} a rank "
                          f"computes some for others; use parallelism.expert=1, or {without(key)}")  # fmt: skip
    if layout.compression is not Compression.none:
        raise ConfigError(f"{key} compares the gradients with their sum, to which parallelism.compression="
                          f"{layout.compression.value} adds noise of its own; use parallelism.compression=none, or "
                          f"{without(key)}")  # fmt: skip
    if zeropp := options(layout.zeropp):
        raise ConfigError(f"{key} observes the sums of gradients, which {zeropp} replaces; "
                          f"use {ZEROPP_OFF}, or {without(key)}")  # fmt: skip
    if layout.data is not None:
        check_groups(config, layout.data)


def largest_group(config: Config) -> int | None:
    """Return the largest size of micro-batches with which one data rank has several in every step; None if there is
    none."""
    sizes = batch_schedule(config.data.global_batch_size, config.data.batch_ramp).sizes()
    fit = (size for size in divisors(min(sizes))[-2::-1] if size <= MAX_MICRO_BATCH)
    return next((size for size in fit if all(runs_batch(config.parallelism, each, size, 1) for each in sizes)), None)


def check_groups(config: Config, data_size: int) -> None:
    """Raise ConfigError if some steps have only one gradient, or several that cannot be told apart, on `data_size` data
    ranks."""
    key, layout, batch = wanted_by(config), config.parallelism, config.data.global_batch_size
    if key is None or data_size > 1:
        return
    if layout.offload is not Offload.none:
        raise ConfigError(f"{key} with parallelism.offload={layout.offload.value} compares the gradients of data "
                          f"ranks; use several, parallelism.offload=none, or {without(key)}")  # fmt: skip
    if splits_backward(layout):
        raise ConfigError(
            f"{key} on one data rank reads gradients in whole backward passes, which parallelism.schedule="
            f"{layout.schedule} splits; use parallelism.schedule=1f1b or interleaved_1f1b, or {without(key)}"
        )
    largest, micro, ramp = largest_group(config), config.data.micro_batch_size, config.data.batch_ramp
    smallest = min(batch_schedule(batch, ramp).sizes())
    if config.data.handed_over or (largest is not None if micro is None else 2 * micro <= smallest):
        return
    size = f"data.global_batch_size={batch}" if ramp is None else f"the first size of data.batch_ramp={ramp}"
    fix = f"data.micro_batch_size={largest}, more ranks" if largest else "a larger one, more ranks"
    raise ConfigError(
        f"{key} compares the gradients of several ranks or micro-batches, but {size} is one micro-batch on one data "
        f"rank; use {fix}, or {without(key)}"
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


def _check_ramp(config: Config) -> None:
    """Raise ConfigError for a batch that is to follow a noise scale which is not measured, and for keys of the rule
    that are out of range or have no effect."""
    data = config.data
    if not batch_schedule(data.global_batch_size, data.batch_ramp).measured:
        rule = {key: getattr(data, key) for key in ("ramp_factor", "ramp_steps")}
        if unused := {key: value for key, value in rule.items() if value != getattr(DataConfig, key)}:
            values = " ".join(f"data.{key}={value}" for key, value in unused.items())
            defaults = " ".join(f"data.{key}={getattr(DataConfig, key)}" for key in unused)
            raise ConfigError(f"{values} has no effect without data.batch_ramp=[first size, increment]; set that, or "
                              f"{defaults}")  # fmt: skip
        return
    ramp = f"data.batch_ramp={data.batch_ramp}"
    if wanted_by(config) is None:
        raise ConfigError(f"{ramp} gives no number of samples, so that the batch follows the gradient noise scale, "
                          "which is not measured; set trainer.noise_scale=true, or give [first size, increment, "
                          "samples]")  # fmt: skip
    if not 0 < data.ramp_factor < math.inf:
        raise ConfigError(f"data.ramp_factor={data.ramp_factor} must be above 0 and finite; take e.g. 1")
    if data.ramp_steps < 1:
        raise ConfigError(f"data.ramp_steps={data.ramp_steps} must be at least 1; take e.g. 100")
    if (epochs := config.trainer.max_epochs) is not None:
        raise ConfigError(f"trainer.max_epochs={epochs:g} is no number of steps while {ramp} lets the batch follow the "
                          "noise scale; use trainer.max_steps, or give [first size, increment, samples]")  # fmt: skip


def without(key: str) -> str:
    """Return the override that turns off a key of `wanted_by`."""
    return key.replace("true", "false")
