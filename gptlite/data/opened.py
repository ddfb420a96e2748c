"""Interface of a run's opened data, of any kind."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from gptlite.data.batch_loader import BatchLoader
from gptlite.data.batches import BatchSchedule
from gptlite.errors import ConfigError
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import from_all
from gptlite.tokenizers.base import Tokenizer

Identity = dict[str, str | dict[str, dict[str, str]]]


class OpenedData(ABC):
    """Data of a run. A resumed run compares `identity` to detect changed data. Samples that are not tokens have no
    tokenizer."""

    name: str
    identity: Identity
    tokenizer: Tokenizer | None

    @abstractmethod
    def num_samples(self, sequence_length: int) -> int:
        """Return the number of training samples in an epoch."""

    @abstractmethod
    def describe(self) -> str:
        """Return a one-line summary."""

    @abstractmethod
    def loader(self, config: Any, schedule: BatchSchedule, micro_batch_size: int, mesh: Mesh, seed: int) -> BatchLoader:
        """Return this rank's loader. `config` is the section that the data was opened with."""

    def example(self) -> tuple[Any, Tensor] | None:
        """Return the input and the target of the first training sample, as a batch of one; None for tokens."""
        return None


def require_same(identity: Identity, mesh: Mesh, differ: str) -> None:
    """Raise ConfigError, which begins with `differ`, unless all ranks have opened the same data."""
    if len(set(from_all(mesh, lambda: json.dumps(identity, sort_keys=True)))) > 1:
        raise ConfigError(f"{differ}; use a folder that all ranks share")
