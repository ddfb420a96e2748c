"""Totals of an optimizer step over the global batch, which travel between ranks and to the host as one vector."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


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
