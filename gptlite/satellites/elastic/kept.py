"""Checks of the keys of checkpoints in memory. Does not import torch."""

from __future__ import annotations

from gptlite.config.schema import Config
from gptlite.errors import ConfigError


def check_memory(config: Config) -> None:
    """Raise ConfigError for copies of checkpoints that are not kept, or on more nodes than there are."""
    replicas, interval, nodes = config.checkpoint.replicas, config.checkpoint.memory_steps, config.cluster.nodes
    if replicas and not interval:
        raise ConfigError(
            f"checkpoint.replicas={replicas} copies checkpoints in memory, but checkpoint.memory_interval=0 keeps "
            "none; leave checkpoint.memory_interval out for 10 steps, or set checkpoint.replicas=0"
        )
    if nodes is not None and 1 < nodes <= replicas:  # a cluster of one node is the default, whatever the run has
        raise ConfigError(f"checkpoint.replicas={replicas} is the number of other nodes with a copy, but "
                          f"cluster.nodes={nodes}; use checkpoint.replicas={nodes - 1}")  # fmt: skip
