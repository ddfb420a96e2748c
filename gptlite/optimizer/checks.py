"""Checks of optimizer and schedule settings before a run starts. This module does not import torch."""

from gptlite.optimizer.config import OptimizerConfig, require
from gptlite.optimizer.schedule import resolve_warmup_steps
from gptlite.optimizer.schedule_config import CosineConfig, LinearConfig, ScheduleConfig, WarmupConfig, WSDConfig


def check_optimizer(optimizer: OptimizerConfig, schedule: ScheduleConfig, max_steps: int | None) -> None:
    """Raise ConfigError, with the key and the fix, for settings that are invalid or do not fit `max_steps`, which is
    None if it is not known yet."""
    optimizer.check()
    _check_shape(schedule)
    if max_steps is not None:
        _check_length(schedule, max_steps)
        optimizer.completed(max_steps, resolve_warmup_steps(schedule, max_steps))


def _check_shape(config: ScheduleConfig) -> None:
    warmup = config.warmup_steps
    require(warmup is None or warmup >= 0, "schedule.warmup_steps", warmup, "must be 0 or more, or null (default)")
    if isinstance(config, CosineConfig | LinearConfig | WSDConfig | WarmupConfig):
        require(0 <= config.min_ratio <= 1, "schedule.min_ratio", config.min_ratio, "must be from 0 to 1")
    if isinstance(config, WarmupConfig):
        require(0 <= config.end_ratio <= 1, "schedule.end_ratio", config.end_ratio, "must be from 0 to 1")
        first = config.first_ratio
        require(first is None or 0 <= first <= 1, "schedule.first_ratio", first, "must be from 0 to 1, or null")
    if isinstance(config, WSDConfig):
        fraction = config.decay_fraction
        require(0 < fraction <= 1, "schedule.decay_fraction", fraction, "must be above 0 and at most 1, e.g. 0.2")


def _check_length(config: ScheduleConfig, max_steps: int) -> None:
    """Raise ConfigError unless the warmup leaves steps at the peak and the decay does not end early at a rate of 0."""
    warmup = resolve_warmup_steps(config, max_steps)
    fix = f"does not end before trainer.max_steps={max_steps}; set schedule.warmup_steps={max_steps // 10}"
    require(warmup == 0 or warmup < max_steps, "schedule.warmup_steps", warmup, fix)
    if not isinstance(config, CosineConfig | LinearConfig | WSDConfig | WarmupConfig) or config.decay_steps is None:
        return
    key, steps = "schedule.decay_steps", config.decay_steps
    fix = f"must be above schedule.warmup_steps={warmup}; null ends the decay at trainer.max_steps"
    require(steps > warmup, key, steps, fix)
    low = "end_ratio" if isinstance(config, WarmupConfig) else "min_ratio"
    fix = f"leaves a rate of 0 until trainer.max_steps={max_steps}; set {key}=null or schedule.{low}=0.1"
    require(getattr(config, low) > 0 or steps >= max_steps, key, steps, fix)
