"""Checks of the data configuration before anything is written. Imports neither torch nor numpy."""

import math
import sys
from collections.abc import Iterable
from pathlib import Path

from gptlite.data.batches import batch_schedule
from gptlite.data.config import DataConfig, SyntheticConfig, TokensConfig
from gptlite.data.registry import kind_of
from gptlite.errors import ConfigError, did_you_mean
from gptlite.invocation import command
from gptlite.limits import SIZE, VOCABULARY


def check_settings(config: DataConfig) -> None:
    """Raise ConfigError, naming the key and the fix, for invalid data settings. No text is read."""
    for key in ("global_batch_size", "micro_batch_size", "sequence_length"):
        if (value := getattr(config, key)) is not None and not 1 <= value <= SIZE:
            raise ConfigError(f"data.{key}={value} must be {'at least 1' if value < 1 else f'at most {SIZE:,}'}")
    batch_schedule(config.global_batch_size, config.batch_ramp)
    kind_of(config).check(config)


def check_tokens(config: TokensConfig) -> None:
    """Raise ConfigError for invalid blend weights, and for folders without tokens."""
    if config.blend is None and config.path is None:
        raise ConfigError(
            f"data.path is not set; give a prepared folder ({command('preprocess')}), or data.blend={{...}}"
        )
    if config.blend is not None and (not isinstance(config.blend, dict) or not config.blend):
        raise ConfigError(f"data.blend={config.blend} has no weights; give e.g. {{data/a: 0.7, data/b: 0.3}}")
    for folder, weight in (config.blend or {}).items():
        # A bool is an int. The upper limit refuses infinity and NaN, which YAML allows.
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= sys.float_info.max:
            raise ConfigError(f"data.blend: {folder} has the weight {weight!r}; give a number above 0, or remove it")
    if sum(float(weight) for weight in (config.blend or {}).values()) == math.inf:
        raise ConfigError("data.blend: the weights are too large to be added; divide them all by the same number")
    for key, folder in [("data.blend", str(each)) for each in config.blend or {}] + [("data.path", config.path)]:
        if folder is not None and not (Path(folder).expanduser() / "train.idx").is_file():
            there = "holds no train.idx" if Path(folder).expanduser().is_dir() else "does not exist"
            hint = did_you_mean(folder, prepared_beside(folder))
            raise ConfigError(f"{key}: {folder} {there}; give a prepared folder ({command('preprocess')}){hint}")


def prepared_beside(folder: str) -> Iterable[str]:
    """Return the prepared folders in the parent of `folder`. `folder` itself may not exist."""
    parent = Path(folder).expanduser().parent
    return sorted(str(Path(folder).parent / index.parent.name) for index in parent.glob("*/train.idx"))


def check_synthetic(config: SyntheticConfig) -> None:
    """Raise ConfigError for a vocabulary size that is out of range, and for too few tokens."""
    if not 2 <= config.vocab_size <= VOCABULARY:
        raise ConfigError(f"data.vocab_size={config.vocab_size} must be from 2 to {VOCABULARY:,}")
    if config.num_tokens <= config.sequence_length:
        raise ConfigError(
            f"data.num_tokens={config.num_tokens} is too few for one sequence; "
            f"give more than data.sequence_length={config.sequence_length}"
        )
