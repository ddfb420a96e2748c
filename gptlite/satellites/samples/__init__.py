"""Datasets of samples that are not tokens: a plug-in that comes with gptlite. Other plug-ins register the datasets.

Does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gptlite.data.config import DatasetConfig
from gptlite.data.registry import DataKind, register_kind, source_of
from gptlite.errors import ConfigError
from gptlite.progress import Log

if TYPE_CHECKING:
    from gptlite.data.opened import OpenedData
    from gptlite.parallelism.mesh import Mesh


def check_samples(config: DatasetConfig) -> None:
    """Raise ConfigError for a dataset that is not registered, and for settings that only sequences of tokens have."""
    source_of(config)
    for key, value, only in (
        ("sequence_length", config.sequence_length, 1),
        ("packing", config.packing.value, "concatenate"),
    ):
        if value != only:
            raise ConfigError(f"data.{key}={value} must be {only}: this dataset has samples, not sequences of tokens")
    if config.workers < 0:
        raise ConfigError(f"data.workers={config.workers} must be at least 0")


def _open(config: DatasetConfig, seed: int, log: Log, mesh: Mesh) -> OpenedData:
    from gptlite.satellites.samples.dataset import open_on_ranks

    return open_on_ranks(config, mesh)


register_kind(DataKind(DatasetConfig, check_samples, _open))
