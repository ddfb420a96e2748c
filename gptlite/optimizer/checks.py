"""What is known to be wrong with an optimizer or a schedule before anything starts. No torch here."""

import math

from gptlite.errors import ConfigError
from gptlite.optimizer.config import (
    AdamConfig,
    AdamWConfig,
    CosineConfig,
    LinearConfig,
    OptimizerConfig,
    ScheduleConfig,
    SGDConfig,
    WarmupConfig,
    WSDConfig,
)
from gptlite.optimizer.schedule import resolve_warmup_steps


def check_optimizer(optimizer: OptimizerConfig, schedule: ScheduleConfig, max_steps: int) -> None:
    """Raise ConfigError, naming the key and the fix, for values that could not train for `max_steps`."""
    _check_update(optimizer)
    _check_shape(schedule)
    _check_length(schedule, max_steps)


def _check_update(config: OptimizerConfig) -> None:
    _require(0 < config.lr < math.inf, "optimizer.lr", config.lr, "must be above 0 and finite, e.g. optimizer.lr=6e-4")
    _require(0 <= config.weight_decay < math.inf, "optimizer.weight_decay", config.weight_decay, "must be 0 or more")
    _require(
        0 <= config.clip_norm < math.inf, "optimizer.clip_norm", config.clip_norm, "must be 0 (no clipping) or more"
    )
    match config:
        case AdamConfig() | AdamWConfig():
            _require(0 <= config.beta1 < 1, "optimizer.beta1", config.beta1, "must be in [0, 1), e.g. 0.9")
            _require(0 <= config.beta2 < 1, "optimizer.beta2", config.beta2, "must be in [0, 1), e.g. 0.95")
            _require(0 < config.eps < math.inf, "optimizer.eps", config.eps, "must be above 0, e.g. 1e-8")
        case SGDConfig():
            _require(0 <= config.momentum < 1, "optimizer.momentum", config.momentum, "must be in [0, 1), e.g. 0.9")
            _require(
                config.momentum > 0 or not config.nesterov,
                "optimizer.nesterov",
                config.nesterov,
                "needs a momentum; set optimizer.momentum=0.9 or optimizer.nesterov=false",
            )


def _check_shape(config: ScheduleConfig) -> None:
    warmup = config.warmup_steps
    _require(warmup is None or warmup >= 0, "schedule.warmup_steps", warmup, "must be 0 or more; null chooses it")
    if isinstance(config, CosineConfig | LinearConfig | WSDConfig | WarmupConfig):
        _require(0 <= config.min_ratio <= 1, "schedule.min_ratio", config.min_ratio, "is a fraction: give 0 to 1")
    if isinstance(config, WSDConfig):
        fraction = config.decay_fraction
        _require(0 < fraction <= 1, "schedule.decay_fraction", fraction, "must be above 0 and at most 1, e.g. 0.2")


def _check_length(config: ScheduleConfig, max_steps: int) -> None:
    """The warmup must leave steps at the peak, and no step may have a rate of 0 because the decay ended early."""
    warmup = resolve_warmup_steps(config, max_steps)
    _require(
        warmup == 0 or warmup < max_steps,
        "schedule.warmup_steps",
        warmup,
        f"never reaches the peak rate: trainer.max_steps={max_steps}; set schedule.warmup_steps={max_steps // 10}",
    )
    if not isinstance(config, CosineConfig | LinearConfig | WSDConfig) or config.decay_steps is None:
        return
    _require(
        config.decay_steps > warmup,
        "schedule.decay_steps",
        config.decay_steps,
        f"must be above schedule.warmup_steps={warmup}; null ends the decay at trainer.max_steps",
    )
    _require(
        config.min_ratio > 0 or config.decay_steps >= max_steps,
        "schedule.decay_steps",
        config.decay_steps,
        f"leaves a rate of 0 until trainer.max_steps={max_steps}; "
        "set schedule.decay_steps=null or schedule.min_ratio=0.1",
    )


def _require(legal: bool, key: str, value: object, fix: str) -> None:
    if not legal:
        raise ConfigError(f"{key}={'null' if value is None else value} {fix}")
