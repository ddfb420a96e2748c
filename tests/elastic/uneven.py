"""Cells whose global batch needs fillers, and what a rank does in the tests of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
from distributed.cells.compare import Result, run_cell
from distributed.cells.layouts import Cell
from torch import Tensor

from gptlite.data.batch_loader import BatchLoader
from gptlite.models.experts import Router


@dataclass(frozen=True)
class Uneven(Cell):
    """A cell in which `micro` x data does not divide the global batch of 48."""

    micro: int = 0

    @property
    def id(self) -> str:
        return f"{super().id}-micro{self.micro}"

    def overrides(self) -> list[str]:
        changed = {"parallelism.data", "data.micro_batch_size"}
        kept = [each for each in super().overrides() if each.partition("=")[0] not in changed]
        return [*kept, "parallelism.elastic=true", f"data.micro_batch_size={self.micro}"]


def with_bug(bug: str) -> Callable[..., Result | None]:
    def run(*arguments: Any) -> Result | None:
        with BUGS[bug]():
            return run_cell(*arguments)

    return run


@contextmanager
def _counted_samples() -> Iterator[None]:
    """Fillers are samples like others."""
    original = BatchLoader._numbers

    def numbers(self: BatchLoader, consumed_samples: int) -> np.ndarray:
        found = original(self, consumed_samples)
        return np.maximum(found, ~found)

    with patch.object(BatchLoader, "_numbers", numbers):
        yield


@contextmanager
def _routed() -> Iterator[None]:
    """Routers count fillers."""
    original = Router.forward

    def forward(self: Router, x: Tensor, sample_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return original(self, x)

    with patch.object(Router, "forward", forward):
        yield


BUGS = {"counted": _counted_samples, "routed": _routed}
run_counted, run_routed = with_bug("counted"), with_bug("routed")
