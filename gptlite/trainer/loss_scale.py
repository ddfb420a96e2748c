"""The loss scale of fp16 training (Micikevicius et al. 2018, arXiv:1710.03740): what keeps small gradients above 6e-8.

Every rank decides by the same numbers, the loss and the gradient norm of the whole step, so that all skip the same
steps. The numbers are on the host anyway, which waits for them once a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gptlite.precision import Policy, PrecisionConfig


@dataclass
class LossScaler:
    """DeepSpeed's and Megatron's rule, which are the same.

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

    def meta(self) -> dict[str, Any]:
        """What changes, as JSON."""
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "overflows": self.overflows,
            "skipped": self.skipped,
        }

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
