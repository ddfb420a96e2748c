"""Expert loads of a mixture-of-experts model in one step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Loads:
    """Expert loads and router losses of each layer with experts, over the global batch.

    `tokens[layer][expert]` is the number of tokens routed to an expert. No token is dropped, so a layer's sum is the
    number of tokens in the batch times the number of experts per token. `losses[layer]` is the router's mean loss.
    """

    tokens: list[list[int]]
    losses: list[float]

    @classmethod
    def of(cls, table: Sequence[Sequence[float]], tokens: int) -> Loads:
        """Build the loads from the rows of BaseSpec.end_step's table, for a batch of `tokens` tokens."""
        return cls([[int(load) for load in row[:-1]] for row in table], [row[-1] / tokens for row in table])

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a training row.

        `expert_imbalance` is the maximum over layers of the largest load divided by the mean load. `expert_entropy` is
        the mean over layers of the normalized entropy, 1 for equal loads. `router_loss` is the sum of the losses.
        """
        values = {
            "expert_imbalance": max(max(row) * len(row) / max(1, sum(row)) for row in self.tokens),
            "expert_entropy": fmean(_entropy(row) for row in self.tokens),
        }
        return values | ({"router_loss": sum(self.losses)} if any(self.losses) else {})


def _entropy(loads: Sequence[int]) -> float:
    shares = [load / sum(loads) for load in loads if load]
    return -sum(share * math.log(share) for share in shares) / math.log(len(loads)) if len(loads) > 1 else 1.0
