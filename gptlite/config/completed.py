"""Values of a configuration that the data completes: the vocabulary size, and the steps of a number of epochs."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from gptlite.data.batches import batch_schedule
from gptlite.data.config import SyntheticConfig
from gptlite.errors import ConfigError
from gptlite.models.registry import spec_of
from gptlite.optimizer.checks import check_optimizer

if TYPE_CHECKING:
    from gptlite.config.schema import Config


def check_length(config: Config) -> None:
    """Raise ConfigError if the length is given twice, or if the optimizer, the schedule or the profiled steps are
    invalid or do not fit the length.

    With `trainer.max_epochs` the number of steps is not known yet; `with_epochs` then checks that they fit.
    """
    trainer = config.trainer
    steps, epochs, profiled = trainer.max_steps, trainer.max_epochs, trainer.profile_steps
    if epochs is not None and any(each.lstrip("+").startswith("trainer.max_steps=") for each in config.run.overrides):
        raise ConfigError(
            f"trainer.max_steps={steps} and trainer.max_epochs={epochs:g} both set the length of the run; leave one out"
        )
    if profiled and (len(profiled) != 2 or not 1 <= profiled[0] <= profiled[1]):
        raise ConfigError(f"trainer.profile_steps={profiled} must be [first, last] with 1 <= first <= last, or []")
    _check_steps(config, steps if epochs is None else None)


def _check_steps(config: Config, steps: int | None) -> None:
    check_optimizer(config.optimizer, config.schedule, steps)
    if steps is not None and (profiled := config.trainer.profile_steps) and profiled[0] > steps:
        raise ConfigError(f"trainer.profile_steps={profiled} begins after the last step, trainer.max_steps={steps}; "
                          "lower it, or leave it out")  # fmt: skip


def with_epochs(config: Config, samples: int) -> Config:
    """Return the configuration with `trainer.max_steps` set from `trainer.max_epochs`, for epochs of `samples` samples.

    The last batch is completed with samples of the next epoch. Raises ConfigError if the schedule or the profiled steps
    do not fit the number of steps.
    """
    epochs, data = config.trainer.max_epochs, config.data
    if epochs is None:
        return config
    total = math.ceil(round(epochs * samples, 6))  # 0.1 epochs of 30 samples are 3, not 3.0000000000000004
    steps = batch_schedule(data.global_batch_size, data.batch_ramp).batches(total)
    _check_steps(config, steps)
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, max_steps=steps))


def with_vocabulary(config: Config, vocab_size: int) -> Config:
    """Return the configuration; if `model.vocab_size` is null, it is set for a tokenizer of this vocabulary size.
    Raises ConfigError if the configured size is smaller."""
    spec = spec_of(config.model)
    config = dataclasses.replace(config, model=spec.with_vocabulary(config.model, vocab_size))
    size = spec.vocab_size(config.model)
    if size is not None and size < vocab_size:
        raise ConfigError(
            f"model.vocab_size={size} is less than the tokenizer's vocabulary size {vocab_size}; "
            f"set model.vocab_size={vocab_size}, or null to use the tokenizer's"
        )
    return config


def refuse_larger_vocabulary(config: Config, vocab_size: int) -> None:
    """Raise ConfigError if the vocabulary of a run's data is larger than that of the weights it starts from."""
    size = spec_of(config.model).vocab_size(config.model)
    if config.checkpoint.load == "weights" and size is not None and size < vocab_size:
        synthetic = f", or data.vocab_size={size}" if isinstance(config.data, SyntheticConfig) else ""
        raise ConfigError(too_few_ids(config.checkpoint.resume, size, vocab_size) + synthetic)


def too_few_ids(checkpoint: str, size: int, vocab_size: int) -> str:
    """Return the message for a checkpoint with a smaller vocabulary than the data's, which no key can fix."""
    return (
        f"checkpoint.resume={checkpoint} has a vocabulary size of {size}, less than the {vocab_size} of the data's "
        f"tokenizer; use data prepared with the checkpoint's tokenizer, or leave out checkpoint.resume and "
        "checkpoint.load to train new weights"
    )
