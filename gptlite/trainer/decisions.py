"""What is decided about a step on the device, so that the host need not wait for its loss and gradient norm."""

import torch
from torch import Tensor

from gptlite.trainer.loss_scale import LossScaler


class Decisions:
    """Whether the optimizer takes a step, and the loss scale of the next one: tensors on a device, from the host's.

    A step whose loss or gradient norm is not finite is not taken. Where no smaller loss scale is left to try, or there
    is none, no later one is either: the host, which hears of it late, has enqueued some already.
    """

    def __init__(self, scaler: LossScaler | None, device: torch.device) -> None:
        self._scaler, self._halted = scaler, torch.zeros((), dtype=torch.bool, device=device)
        self._values = scaler.on_device(device) if scaler else None

    @property
    def scale(self) -> Tensor | float:
        """The loss scale of the next step: fp32, 0-dim; 1.0 without one."""
        return 1.0 if self._values is None else self._values[0].float()

    def decide(self, sums: Tensor) -> Tensor:
        """Whether the step is to change nothing, fp32: 1 or 0. `sums` begin with its loss and norm."""
        overflow = sums[:2].isfinite().all().logical_not()
        skips, ends = overflow | self._halted, overflow
        if self._scaler is not None and self._values is not None:
            self._values, exhausted = self._scaler.advanced(self._values, overflow)
            ends = overflow & exhausted
        self._halted = self._halted | ends
        return skips.float()

    def with_scales(self, sums: Tensor) -> Tensor:
        """What the host is to know of a step: `sums`, and the loss scale's SCALE_VALUES after it."""
        return sums if self._values is None else torch.cat([sums.double(), self._values])
