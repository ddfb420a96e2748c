"""Cells whose global batch no number of micro-batches divides, for test_uneven.py, and the runs of test_degree_runs."""

from __future__ import annotations

from dataclasses import dataclass

from distributed.cells.layouts import Cell


@dataclass(frozen=True)
class Uneven(Cell):
    """A cell with fillers: the global batch of 48 has `micro` x data x accumulation samples less than a multiple."""

    micro: int = 0

    @property
    def id(self) -> str:
        return f"{super().id}-micro{self.micro}"

    def overrides(self) -> list[str]:
        changed = {"parallelism.data", "data.micro_batch_size"}
        kept = [each for each in super().overrides() if each.partition("=")[0] not in changed]
        return [*kept, "parallelism.elastic=true", f"data.micro_batch_size={self.micro}"]
