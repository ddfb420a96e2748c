"""The tables of docs/planner_published.md whose constants are fitted, and how far off their rows may be."""

from __future__ import annotations

from dataclasses import dataclass

from gptlite.config.cluster import ClusterConfig
from plan.published.fit import A100_CONSTANTS, V100_CONSTANTS, Constant
from plan.published.row import Row
from plan.published.rows import deepspeed_rows, megatron_rows


@dataclass(frozen=True)
class Table:
    """Rows of one source, what is fitted to them, and the most that errors may be: fitted, their mean, of a split."""

    title: str
    rows: tuple[Row, ...]
    constants: tuple[Constant, ...]
    fitted: float
    mean: float
    split: float

    def errors(self, cluster: ClusterConfig | None = None) -> list[float]:
        """Sizes of the errors of the rows that count."""
        return [abs(row.error(cluster)) for row in self.rows if row.counted]


MEGATRON = Table(
    "Megatron-LM on A100s (SC'21, table 1)", tuple(megatron_rows()), A100_CONSTANTS, fitted=0.07, mean=0.035, split=0.13
)
DEEPSPEED = Table(
    "Megatron-LM with and without ZeRO on V100s (DeepSpeed's tutorial)",
    tuple(deepspeed_rows()),
    V100_CONSTANTS,
    fitted=0.09,
    mean=0.05,
    split=0.20,
)
