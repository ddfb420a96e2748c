"""1-bit Adam (Tang et al. 2021, arXiv:2102.02888) and 0/1 Adam (Lu et al. 2022, arXiv:2202.06009), as AdamW.

Steps that sum gradients densely are AdamW's own. In the others v is that of the last dense step, with the correction of
its bias by the number of dense steps, so that the first step after the warm-up divides by the same roots as the last
one in it; m keeps its correction. DeepSpeed corrects neither.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from bisect import bisect_right
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gptlite.optimizer import torch_rules
from gptlite.optimizer.base import BuildContext, PiecewiseOptimizer, local_gradients, local_parameters
from gptlite.optimizer.fused import is_fused
from gptlite.optimizer.state import materialized
from gptlite.parallelism.boxes import local_tensor
from gptlite.satellites.onebit.configs import OneBitAdamConfig, ZeroOneAdamConfig
from gptlite.satellites.onebit.momenta import Momenta
from gptlite.torch_private.ops import (
    foreach_add_,
    foreach_addcmul_,
    foreach_div,
    foreach_lerp_,
    foreach_mul_,
)


def build(config: OneBitAdamConfig, context: BuildContext) -> OneBitAdam:
    """Return the optimizer of a configuration. One that is not `completed`, as in a plan, has a warm-up of one step."""
    scaler = config.var_update_scaler if isinstance(config, ZeroOneAdamConfig) else None
    return OneBitAdam(torch_rules.build(config, context), refreshes(config.freeze_step or 1, scaler))


def refreshes(last: int, scaler: int | None = None) -> list[int]:
    """Return the steps, from 1, that refresh second moments: all up to `last`, or with a `scaler` at intervals that
    double after every `scaler` refreshes (0/1 Adam)."""
    steps, step, interval = [], 0, 1
    while (step := step + interval) <= last:
        steps.append(step)
        if scaler is not None and len(steps) % scaler == 0:
            interval *= 2
    return steps


class OneBitAdam(PiecewiseOptimizer):
    """AdamW by another optimizer's rule in the steps `dense`, and with exchanged momenta in all others.

    A step is collective over the data ranks, once `momenta` is an Exchange. State and checkpoints have AdamW's format.
    """

    scales_gradients = True

    def __init__(self, rule: Optimizer, dense: list[int]) -> None:
        super().__init__(rule)
        self.dense, self.momenta = dense, Momenta()

    @property
    def steps(self) -> int:
        """Number of steps taken."""
        state = self.state[self.param_groups[0]["params"][0]]
        return int(state["step"]) if state else 0

    @property
    def exchanges(self) -> bool:
        """True if the next step exchanges momenta, instead of summed gradients."""
        return self._refreshes(self.steps + 1) == self._refreshes(self.steps)

    def update(self, options: dict[str, Any]) -> None:
        """Take a step with gradients that are multiplied by the scalar tensor options["scale"], if it is there."""
        step, factor = self.steps + 1, options.get("scale")
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if self.exchanges:
            self.momenta.advance(parameters, self._local, self.param_groups[0]["betas"][0], factor)
            self._move(step, self.momenta.roots(parameters, self._local))
            return
        self.momenta.refreshed()
        if self._refreshes(step) == step and is_fused(self):
            self.rule.step(**options)
            return
        if factor is not None and (gradients := local_gradients(parameters)):
            foreach_mul_(gradients, factor.to(gradients[0].device))
        if self._refreshes(step) == step:
            self.rule.step()
        else:  # AdamW's rule would correct the bias of v by the number of steps
            self._average()
            self._move(step, [self._local(each, "exp_avg_sq").sqrt() for each in parameters])

    def _average(self) -> None:
        """Update both moments with the gradients."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            (beta1, beta2), gradients = group["betas"], local_gradients(parameters)
            first, second = ([self._local(each, key) for each in parameters] for key in ("exp_avg", "exp_avg_sq"))
            foreach_lerp_(first, gradients, 1 - beta1)
            foreach_mul_(second, beta2)
            foreach_addcmul_(second, gradients, gradients, 1 - beta2)

    def _move(self, step: int, roots: list[Tensor]) -> None:
        """Update the parameters from their momenta and the roots of second moments, as AdamW does. Count the step."""
        roots = self._corrected(roots, step)
        for group in self.param_groups:
            (beta1, _), lr, parameters = group["betas"], group["lr"], group["params"]
            own, roots = roots[: len(parameters)], roots[len(parameters) :]
            foreach_mul_(local_parameters(parameters), 1 - lr * group["weight_decay"])
            self._add_updates(group, parameters, own, lr / (1 - beta1**step))
            for parameter in parameters:
                self.state[parameter]["step"] += 1

    def _corrected(self, roots: list[Tensor], step: int) -> list[Tensor]:
        """Return the roots of second moments with the correction of their bias."""
        return list(foreach_div(roots, math.sqrt(1 - self.param_groups[0]["betas"][1] ** self._refreshes(step))))

    def _add_updates(
        self, group: dict[str, Any], parameters: list[nn.Parameter], roots: list[Tensor], rate: float
    ) -> None:
        """Subtract rate · m / (roots + eps) from parameters of a group. Changes the roots."""
        foreach_add_(roots, group["eps"])
        updates = foreach_div([self._local(each, "exp_avg") for each in parameters], roots)
        foreach_add_(local_parameters(parameters), updates, alpha=-rate)

    def _refreshes(self, step: int) -> int:
        """Return the number of second moments' refreshes up to a step."""
        return bisect_right(self.dense, step)

    def _local(self, parameter: Tensor, key: str) -> Tensor:
        """Return this rank's part of a state tensor."""
        return local_tensor((self.state[parameter] or materialized(self.rule, parameter))[key])
