"""On-device decision whether to apply a step, so that the host does not wait for the loss and gradient norm."""

from dataclasses import replace

import torch
from torch import Tensor

from gptlite.trainer.loss_scale import LossScaler
from gptlite.trainer.totals import StepTotals


class Decisions:
    """Device tensors that decide whether to apply an optimizer step, and set the loss scale of the next step.

    A step with a non-finite loss or gradient norm is not applied. If the loss scale cannot be reduced, or the run has
    none, later steps are not applied either, since the host enqueues more steps before it reads the result.
    """

    def __init__(self, scaler: LossScaler | None, device: torch.device) -> None:
        self._scaler, self._halted = scaler, torch.zeros((), dtype=torch.bool, device=device)
        self._values = scaler.on_device(device) if scaler else None

    @property
    def scale(self) -> Tensor | float:
        """Loss scale of the next step: fp32, 0-dim; 1.0 without loss scaling."""
        return 1.0 if self._values is None else self._values[0].float()

    def decide(self, totals: StepTotals) -> tuple[Tensor, StepTotals]:
        """Return fp32 1 to skip the step, 0 to apply it; and the totals with the loss scale's new values."""
        overflow = (totals.loss.isfinite() & totals.norm.isfinite()).logical_not()
        # Tensor operations instead of branches: reading a value on the host would synchronise with the device.
        skips, ends = overflow | self._halted, overflow
        if self._scaler is not None and self._values is not None:
            self._values, exhausted = self._scaler.advanced(self._values, overflow)
            ends = overflow & exhausted
        self._halted = self._halted | ends  # stays set until the host reads the result and raises
        return skips.float(), replace(totals, scale=self._values)
