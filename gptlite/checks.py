"""What must hold across a configuration's sections. Run before anything is written or any rank starts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gptlite.checkpoint.config import CheckpointConfig
from gptlite.data.check import check_settings as check_data
from gptlite.errors import ConfigError, did_you_mean
from gptlite.metrics.sinks import check as check_logger
from gptlite.optimizer.checks import check_optimizer

if TYPE_CHECKING:
    from gptlite.config import Config


MAX_STEP_TOKENS = 2**31  # twenty times the largest batches published; past it a typo, not a plan


def check(config: Config) -> None:
    """Raises ConfigError, one line, at the first key that cannot work."""
    _positive(config)
    check_data(config.data)
    _model(config)
    _parallelism(config)
    _batch(config)
    _trainer(config)
    check_optimizer(config.optimizer, config.schedule, config.trainer.max_steps)
    _checkpoint(config.checkpoint)
    check_logger(config.logger)


def divisors(number: int) -> str:
    """`1, 2, 3, 6`: the degrees that divide a number."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def _positive(config: Config) -> None:
    sections = {
        "model": ("num_layers", "num_heads", "d_model", "d_ff", "vocab_size", "vocab_multiple", "sequence_length"),
        "parallelism": ("tensor", "pipeline", "context", "data", "dp_replicate"),
        "trainer": ("max_steps", "log_interval", "eval_samples"),
    }
    for section, keys in sections.items():
        for key in keys:
            value = getattr(getattr(config, section), key)
            if value is not None and value <= 0:
                raise ConfigError(f"{section}.{key}={value} must be at least 1")
    for key in ("name", "dir"):
        if not getattr(config.run, key).strip():
            raise ConfigError(f"run.{key} is empty; give one, or leave it out")
    minutes = config.trainer.max_time
    if minutes is not None and not 0 < minutes < math.inf:
        raise ConfigError(f"trainer.max_time={minutes} must be above 0: it is in minutes")


def _model(config: Config) -> None:
    model = config.model
    if model.d_model % model.num_heads:
        raise ConfigError(
            f"model.d_model={model.d_model} is not divisible by model.num_heads={model.num_heads}; "
            f"the heads can be {divisors(model.d_model)}"
        )
    if not 0 <= model.dropout < 1:
        raise ConfigError(f"model.dropout={model.dropout} must be at least 0 and below 1")
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"seed={config.seed} must be at least 0 and below 2**32")
    if config.data.sequence_length > model.sequence_length:
        raise ConfigError(
            f"data.sequence_length={config.data.sequence_length} is longer than model.sequence_length="
            f"{model.sequence_length}, the positions the model learns; lower the first or raise the second"
        )


def _parallelism(config: Config) -> None:
    layout = config.parallelism
    for key in ("tensor", "pipeline", "context", "data", "dp_replicate"):
        value = getattr(layout, key)
        if value not in (None, 1):
            raise ConfigError(f"parallelism.{key}={value}: this version runs one device; use parallelism.{key}=1")
    if layout.zero != 0:
        raise ConfigError(f"parallelism.zero={layout.zero}: this version runs one device; use parallelism.zero=0")


def _batch(config: Config) -> None:
    data, ranks = config.data, config.parallelism.data or 1
    per_pass = data.micro_batch_size * ranks
    if (tokens := data.global_batch_size * data.sequence_length) > MAX_STEP_TOKENS:
        raise ConfigError(f"data.global_batch_size={data.global_batch_size} is {tokens:,} tokens a step; lower it")
    if data.global_batch_size % per_pass:
        below = data.global_batch_size // per_pass * per_pass
        nearest = " or ".join(str(n) for n in (below, below + per_pass) if n > 0)
        raise ConfigError(
            f"data.global_batch_size={data.global_batch_size} is not data.micro_batch_size={data.micro_batch_size} "
            f"x {ranks} data-parallel ranks x a whole number of accumulation steps; "
            f"try data.global_batch_size={nearest}, or a micro-batch of {divisors(data.global_batch_size // ranks)}"
        )


def _trainer(config: Config) -> None:
    trainer = config.trainer
    steps = trainer.profile_steps
    if steps and (len(steps) != 2 or not 1 <= steps[0] <= steps[1]):
        raise ConfigError(f"trainer.profile_steps={steps} must be [first, last] with 1 <= first <= last, or []")
    if steps and steps[0] > trainer.max_steps:
        raise ConfigError(f"trainer.profile_steps={steps} begins after trainer.max_steps={trainer.max_steps}")
    for key in ("eval_interval", "sample_tokens"):
        if getattr(trainer, key) < 0:
            raise ConfigError(f"trainer.{key}={getattr(trainer, key)} must not be negative; 0 turns it off")


def _checkpoint(config: CheckpointConfig) -> None:
    for key, zero in (("interval", "saves only at the end"), ("keep", "keeps all")):
        if getattr(config, key) < 0:
            raise ConfigError(f"checkpoint.{key}={getattr(config, key)} must not be negative; 0 {zero}")
    if config.load not in ("all", "weights"):
        hint = did_you_mean(config.load, ("all", "weights"))
        raise ConfigError(f"checkpoint.load={config.load} is not all or weights{hint}")
