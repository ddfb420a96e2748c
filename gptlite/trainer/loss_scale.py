"""Loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740), which keeps gradients above fp16's minimum, 6e-8,
and the decision on the device whether to apply a step.

All ranks skip the same steps, since the decision depends only on the loss and gradient norm of the whole step. If the
host runs ahead of the device (trainer/steps.py), `advanced` computes the update on the device, and the host reads the
result later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gptlite.precision import LossScaleRule, Policy, PrecisionConfig
from gptlite.trainer.totals import StepTotals

SCALE_VALUES = ("scale", "good_steps", "overflows", "skipped")  # the mutable fields of LossScaler


@dataclass
class LossScaler:
    """Dynamic loss scale by the rule of Megatron-LM (DynamicGradScaler) or of DeepSpeed (DynamicLossScaler).

    `window` consecutive steps without overflow multiply the scale by `factor`. After that, the first `hysteresis` - 1
    overflows do not change the scale, and later ones divide it by `factor`, down to `minimum`. A step that overflows is
    skipped. With `deepspeed`, the first increase, and the first one after an overflow, comes a step later, and skipped
    steps do not advance the learning-rate schedule.
    """

    scale: float
    window: int
    hysteresis: int
    minimum: float
    factor: float
    good_steps: int = 0  # steps since the last overflow or the last increase; with `deepspeed`, 1 at an increase
    overflows: int = 0  # overflows since the last increase
    skipped: int = 0  # skipped steps of the run
    deepspeed: bool = False

    @property
    def exhausted(self) -> bool:
        """True if the next overflow could not reduce the scale."""
        return self.scale <= self.minimum and self.overflows + 1 >= self.hysteresis

    def update(self, overflow: bool) -> None:
        """Update the scale after a step. `overflow` is True if the step overflowed and was skipped."""
        if overflow:
            self.good_steps, self.overflows, self.skipped = 0, self.overflows + 1, self.skipped + 1
            if self.overflows >= self.hysteresis:
                self.scale = max(self.scale / self.factor, self.minimum)
            return
        self.good_steps += 1
        if self.good_steps >= self.window + self.deepspeed:  # above it if the window or the rule has changed
            self.good_steps, self.overflows = int(self.deepspeed), 0
            self.scale *= self.factor

    def on_device(self, device: torch.device) -> Tensor:
        """Return SCALE_VALUES as an fp64 tensor on the device, without synchronisation."""
        # fp64 is exact for counts and for a Python float. A copy from the host would synchronise, unlike fill_.
        values = torch.empty(len(SCALE_VALUES), dtype=torch.float64, device=device)
        for index, name in enumerate(SCALE_VALUES):
            values[index].fill_(getattr(self, name))
        return values

    def advanced(self, values: Tensor, overflow: Tensor) -> tuple[Tensor, Tensor]:
        """Return SCALE_VALUES after a step, by the rule of `update`, and whether the scale was `exhausted` before it.

        `overflow` and both results are device tensors; `overflow` and the second result are bool scalars.
        """
        scale, good, overflows, skipped = values.unbind()
        none, shrinks = torch.zeros_like(scale), overflows + 1 >= self.hysteresis
        grows = good + 1 >= self.window + self.deepspeed
        lower = torch.where(shrinks, (scale / self.factor).clamp(min=self.minimum), scale)
        bad = torch.stack([lower, none, overflows + 1, skipped + 1])
        same = torch.stack([scale, good + 1, overflows, skipped])
        larger = torch.stack([scale * self.factor, none + self.deepspeed, none, skipped])
        after = torch.where(overflow, bad, torch.where(grows, larger, same))
        return after, (scale <= self.minimum) & shrinks

    def take(self, values: Sequence[float]) -> None:
        """Set the host's values from the result of `advanced`."""
        self.scale = values[0]
        self.good_steps, self.overflows, self.skipped = map(int, values[1:])

    def meta(self) -> dict[str, Any]:
        """Return the mutable state in JSON form."""
        return {name: getattr(self, name) for name in SCALE_VALUES}

    def load_meta(self, meta: dict[str, Any]) -> None:
        """Restore the state returned by `meta`; a static scale keeps its configured value."""
        self.good_steps, self.overflows, self.skipped = meta["good_steps"], meta["overflows"], meta["skipped"]
        if self.factor > 1.0:
            self.scale = max(meta["scale"], self.minimum)


def build_scaler(config: PrecisionConfig, policy: Policy) -> LossScaler | None:
    """Build the loss scaler of an fp16 run; None for other dtypes. A static scale has a factor of 1."""
    if not policy.scales_loss:
        return None
    if fixed := config.loss_scale:
        start, minimum, factor = fixed, fixed, 1.0
    else:
        start, minimum, factor = 2.0**config.initial_scale_power, config.min_loss_scale, config.scale_factor
    by_deepspeed = config.loss_scale_rule is LossScaleRule.deepspeed
    return LossScaler(start, config.loss_scale_window, config.hysteresis, minimum, factor, deepspeed=by_deepspeed)


class Decisions:
    """Device tensors that decide whether to apply an optimizer step, and set the loss scale of the next step.

    A step with a non-finite loss or gradient norm is not applied. If the loss scale cannot be reduced, or the run has
    none, later steps are not applied either, since the host enqueues more steps before it reads the result. The tensors
    stay the same ones, so a CUDA graph may hold them.
    """

    def __init__(self, scaler: LossScaler | None, device: torch.device) -> None:
        self._scaler, self._halted = scaler, torch.zeros((), dtype=torch.bool, device=device)
        self._values = scaler.on_device(device) if scaler else None

    def restart(self) -> None:
        """Continue from the host's loss scale, which must be current."""
        self._halted.zero_()
        if self._scaler is not None and self._values is not None:
            self._values.copy_(self._scaler.on_device(self._values.device))

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
            after, exhausted = self._scaler.advanced(self._values, overflow)
            self._values.copy_(after)
            ends = overflow & exhausted
        self._halted.logical_or_(ends)  # stays set until the host reads the result and raises
        return skips.float(), replace(totals, scale=self._values)
