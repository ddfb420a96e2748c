"""Checks of `cluster.exclude_slow` and `trainer.on_divergence`. Does not import torch."""

from __future__ import annotations

from gptlite.config.schema import Config
from gptlite.errors import ConfigError

ON_DIVERGENCE = ("stop", "restore")


def check_decisions(config: Config) -> None:
    """Raise ConfigError for a decision on nodes that cannot be taken in this run."""
    slow, trainer = config.cluster.exclude_slow, config.trainer
    if slow is not None and not config.parallelism.elastic:
        raise ConfigError(
            f"cluster.exclude_slow={slow:g} needs a run that can go on without a node; use parallelism.elastic=true, "
            "or leave it out"
        )
    if trainer.on_divergence not in ON_DIVERGENCE:
        raise ConfigError(f"trainer.on_divergence={trainer.on_divergence} must be stop or restore")
    if trainer.on_divergence == "restore" and not trainer.replica_check_interval:
        raise ConfigError(
            "trainer.on_divergence=restore needs checks that copies are equal; set trainer.replica_check_interval, "
            "e.g. to 100, or use trainer.on_divergence=stop"
        )
