"""The loss scale of fp16 training (Micikevicius et al. 2018, arXiv:1710.03740): what keeps small gradients above 6e-8.

Every rank decides by the same numbers, the loss and the gradient norm of the whole step, so that all skip the same
steps. Where the host runs ahead of the device (trainer/steps.py) the rule is computed there, by `advanced`, and the
host follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gptlite.precision import Policy, PrecisionConfig

SCALE_VALUES = ("scale", "good_steps", "overflows", "skipped")  # what changes


@dataclass
class LossScaler:
    """Megatron-LM's rule (its DynamicGradScaler). DeepSpeed's differs in one thing: it grows one step later.

    `window` steps in a row without overflow multiply the scale by `factor`. The first `hysteresis` - 1 overflows after
    that change nothing, later ones divide it by `factor`, down to `minimum`. The step of an overflow is skipped.
    """

    scale: float
    window: int
    hysteresis: int
    minimum: float
    factor: float
    good_steps: int = 0  # since the last overflow, or the last growth
    overflows: int = 0  # since the last growth
    skipped: int = 0  # steps of the run

    @property
    def exhausted(self) -> bool:
        """Whether an overflow now could not be answered by a smaller scale."""
        return self.scale <= self.minimum and self.overflows + 1 >= self.hysteresis

    def update(self, overflow: bool) -> None:
        """A step has been taken, or skipped for its overflow."""
        if overflow:
            self.good_steps, self.overflows, self.skipped = 0, self.overflows + 1, self.skipped + 1
            if self.overflows >= self.hysteresis:
                self.scale = max(self.scale / self.factor, self.minimum)
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.good_steps, self.overflows = 0, 0
            self.scale *= self.factor

    def on_device(self, device: torch.device) -> Tensor:
        """SCALE_VALUES, fp64. They are filled in: a copy would wait for the device."""
        values = torch.empty(len(SCALE_VALUES), dtype=torch.float64, device=device)
        for index, name in enumerate(SCALE_VALUES):
            values[index].fill_(getattr(self, name))
        return values

    def advanced(self, values: Tensor, overflow: Tensor) -> tuple[Tensor, Tensor]:
        """SCALE_VALUES after a step, as `update` has them; and whether before it they were `exhausted`.

        `overflow`, bool, and all that is computed are on the device.
        """
        scale, good, overflows, skipped = values.unbind()
        none, shrinks, grows = torch.zeros_like(scale), overflows + 1 >= self.hysteresis, good + 1 == self.window
        lower = torch.where(shrinks, (scale / self.factor).clamp(min=self.minimum), scale)
        bad = torch.stack([lower, none, overflows + 1, skipped + 1])
        same = torch.stack([scale, good + 1, overflows, skipped])
        larger = torch.stack([scale * self.factor, none, none, skipped])
        after = torch.where(overflow, bad, torch.where(grows, larger, same))
        return after, (scale <= self.minimum) & shrinks

    def take(self, values: Sequence[float]) -> None:
        """Takes what `advanced` gave, on the host."""
        self.scale = values[0]
        self.good_steps, self.overflows, self.skipped = map(int, values[1:])

    def meta(self) -> dict[str, Any]:
        """What changes, as JSON."""
        return {name: getattr(self, name) for name in SCALE_VALUES}

    def load_meta(self, meta: dict[str, Any]) -> None:
        """Takes back what `meta` gave; a static scale stays as it is configured."""
        self.good_steps, self.overflows, self.skipped = meta["good_steps"], meta["overflows"], meta["skipped"]
        if self.factor > 1.0:
            self.scale = max(meta["scale"], self.minimum)


def build_scaler(config: PrecisionConfig, policy: Policy) -> LossScaler | None:
    """The scaler of a run that computes in fp16; None for others. A static scale is one that grows and shrinks by 1."""
    if not policy.scales_loss:
        return None
    if config.loss_scale:
        fixed = config.loss_scale
        return LossScaler(fixed, config.loss_scale_window, config.hysteresis, minimum=fixed, factor=1.0)
    start = 2.0**config.initial_scale_power
    return LossScaler(start, config.loss_scale_window, config.hysteresis, config.min_loss_scale, config.scale_factor)
