"""Loads of a mixture of experts in a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Loads:
    """Tokens of each expert by layer, over the global batch, and the router's losses of each layer per token.

    No token is dropped: the tokens of a layer's experts are those of the batch times the experts that each takes.
    """

    tokens: list[list[int]]
    losses: list[float]

    @classmethod
    def of(cls, table: Sequence[float], columns: int, tokens: int) -> Loads:
        """Return the loads of ModelSpec.end_step's table, flattened, in a batch of that many tokens."""
        rows = [table[start : start + columns] for start in range(0, len(table), columns)]
        return cls([[int(each) for each in row[:-1]] for row in rows], [row[-1] / tokens for row in rows])

    def metrics(self) -> dict[str, float]:
        """Return the largest load over the mean load, of the layer where it is largest; the entropy of the loads, 1 if
        all are equal, as the mean over layers; and the sum of the router's losses."""
        found = {
            "expert_imbalance": max(max(row) * len(row) / max(1, sum(row)) for row in self.tokens),
            "expert_entropy": fmean(_entropy(row) for row in self.tokens),
        }
        return found | ({"router_loss": sum(self.losses)} if any(self.losses) else {})


def _entropy(loads: Sequence[int]) -> float:
    shares = [load / sum(loads) for load in loads if load]
    return -sum(share * math.log(share) for share in shares) / math.log(len(loads)) if len(loads) > 1 else 1.0
