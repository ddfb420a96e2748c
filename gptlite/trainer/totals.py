"""Totals of an optimizer step over the global batch, which travel between ranks and to the host as one vector, and the
loads of experts among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor


class GradientNoise:
    """Interface of an estimator of the noise in gradients, which a satellite provides.

    `gain` is the factor of the last step's learning rate and its length on the schedule's clock; `gained` is the sum of
    `gain` - 1 over all steps.
    """

    gain, gained = 1.0, 0.0

    def share(self, targets: Tensor) -> Tensor:
        """Return this rank's summands of a step's sums, fp64, once its gradients are complete. `targets` are the
        numbers of targets of this rank's micro-batches."""
        raise NotImplementedError

    def take(self, totals: StepTotals, samples: int, loss_scale: float, step: int, stop: int) -> None:
        """Take the totals of a step that is applied, on the host, and set `gain` and `gained`. The step's number is
        `step`, and its samples end before `stop`. The next step may have begun."""
        raise NotImplementedError

    def meta(self) -> dict[str, Any]:
        """Return the state in JSON form, see saved_meta.py."""
        raise NotImplementedError

    def load_meta(self, meta: dict[str, Any] | None) -> None:
        """Restore the result of `meta`. None, of a run without an estimator, begins anew."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Totals of a step. One all-reduce of `pack` sums them over ranks, and one copy takes them to the host.

    Loss and norm are multiplied by the loss scale, if there is one. Optional totals are None in a run without them.
    """

    loss: Tensor  # mean over the targets, []
    norm: Tensor  # gradient norm, []; its square, as long as ranks add up their shares
    square: Tensor | None = None  # of the norm, with several ranks
    flags: Tensor | None = None  # stop flags of `Stopping`, one rank has none
    metrics: Tensor | None = None  # sums of the model's own metrics over the targets, [metrics]
    targets: Tensor | None = None  # number of targets, []
    loads: Tensor | None = None  # table of BaseSpec.end_step, [layers, experts + 1]
    noise: Tensor | None = None  # sums of GradientNoise.share
    scale: Tensor | None = None  # SCALE_VALUES after the step, if the device updates the loss scale

    def pack(self) -> Tensor:
        """Return all totals as one vector, fp64."""
        return torch.cat([total.double().flatten() for total in self._present().values()])

    def unpack(self, vector: Tensor) -> StepTotals:
        """Return totals like these, with the values of a `vector` from `pack`."""
        present = self._present()
        values = vector.split([total.numel() for total in present.values()])
        views = {name: part.view(present[name].shape) for name, part in zip(present, values, strict=True)}
        return replace(self, **views)

    def _present(self) -> dict[str, Tensor]:
        return {name: total for name, total in vars(self).items() if total is not None}


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
