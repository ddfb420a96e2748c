"""Vocabulary size of a run's model, from the data's tokenizer."""

from __future__ import annotations

import dataclasses

from gptlite.config.schema import Config
from gptlite.data.config import SyntheticConfig
from gptlite.errors import ConfigError
from gptlite.models.registry import spec_of


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
