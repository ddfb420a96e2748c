"""0/1 Adam (Lu et al. 2022, arXiv:2202.06009, algorithm 1): 1-bit Adam with steps that exchange nothing.

Second moments are refreshed at growing intervals. Once they are frozen, momenta are exchanged at growing intervals.

Between two exchanges rank i steps by its own momentum, m_i = beta1 m_i + (1 - beta1) W g_i, and adds up its steps,
u_i = sum lr m_i. At the exchange all ranks start from the parameters of the last one, take the mean step u of all
ranks, and have the momentum u / sum lr.

The messages are k u_i / (W sum lr), for k steps since the last exchange: sums of momenta, so that errors have the
units of those in 1-bit Adam, and an interval may have any length. (DeepSpeed sends u_i, and drops earlier errors.)
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gptlite.optimizer import torch_rules
from gptlite.optimizer.base import BuildContext, local_parameters
from gptlite.satellites.onebit.adam import OneBitAdam, refreshes
from gptlite.satellites.onebit.configs import ZeroOneAdamConfig
from gptlite.satellites.onebit.momenta import Exchange, Pending
from gptlite.torch_private.ops import foreach_add_, foreach_mul_

LEAST = 1e-20  # weight of a step whose learning rate is 0, so that a mean of momenta exists


def build(config: ZeroOneAdamConfig, context: BuildContext) -> ZeroOneAdam:
    """Return the optimizer of a configuration. One that is not `completed`, as in a plan, has a warm-up of one step."""
    dense, intervals = schedule(config)
    return ZeroOneAdam(torch_rules.build(config, context), dense, intervals)


def schedule(config: ZeroOneAdamConfig) -> tuple[list[int], Intervals]:
    """Return the steps with dense sums, and the intervals between exchanges after them."""
    last = config.freeze_step or 1
    intervals = Intervals(last, config.local_step_scaler or 1, config.local_step_clipper)
    return refreshes(last, config.var_update_scaler), intervals


@dataclass(frozen=True)
class Intervals:
    """Steps from an exchange to the next: 1 up to step `last`, then doubled every `scaler` steps, up to `clipper`."""

    last: int
    scaler: int
    clipper: int

    def at(self, step: int) -> int:
        """Return the interval at a step, from 1."""
        doublings = max(0, step - 1 - self.last) // self.scaler
        return min(self.clipper, 2 ** min(doublings, self.clipper.bit_length()))

    def ends(self, step: int) -> bool:
        """Return True if ranks exchange their steps at the end of this one: if it is a multiple of the interval."""
        return step % self.at(step) == 0


class ZeroOneAdam(OneBitAdam):
    """1-bit Adam with refreshes of second moments in the steps `dense`, and later exchanges at growing intervals.

    Between them the data ranks' parameters and momenta differ, until `settle`. A single data rank has nothing to
    exchange, and takes plain steps.
    """

    def __init__(self, rule: Optimizer, dense: list[int], intervals: Intervals) -> None:
        super().__init__(rule, dense)
        self.intervals = intervals

    def update(self, options: dict[str, Any]) -> None:
        """Take a step, on this rank alone where intervals are longer than one step."""
        step, momenta = self.steps + 1, self.momenta
        if not (self.exchanges and isinstance(momenta, Exchange) and self.intervals.at(step) > 1):
            super().update(options)
            return
        self._step_alone(step, momenta, options.get("scale"))
        if self.intervals.ends(step):
            self.settle()

    def _step_alone(self, step: int, momenta: Exchange, factor: Tensor | None) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if momenta.pending is None:
            anchors = [each.clone() for each in local_parameters(momenta.parameters)]
            moved = [torch.zeros_like(each) for each in anchors]
            momenta.pending = Pending(
                dict(zip(momenta.parameters, anchors, strict=True)),
                dict(zip(momenta.parameters, moved, strict=True)),
                [0.0] * len(self.param_groups),
            )
        pending = momenta.pending
        momenta.advance_alone(parameters, self._local, self.param_groups[0]["betas"][0], factor)
        for at, group in enumerate(self.param_groups):
            exchanged = [parameter for parameter in group["params"] if parameter in pending.moved]
            keep = 1 - group["lr"] * group["weight_decay"]
            rate = max(LEAST, group["lr"] / (1 - group["betas"][0] ** step))
            pending.rates[at] = pending.rates[at] * keep + rate
            if exchanged:
                moved = [pending.moved[each] for each in exchanged]
                foreach_mul_([pending.anchors[each] for each in exchanged] + moved, keep)
                foreach_add_(moved, [self._local(each, "exp_avg") for each in exchanged], alpha=rate)
        pending.steps += 1
        self._move(step, self.momenta.roots(parameters, self._local))

    @torch.no_grad()
    def settle(self) -> None:
        """Exchange the steps since the last exchange, if there are any. Then all data ranks have equal parameters and
        momenta. Collective."""
        momenta = self.momenta
        if not isinstance(momenta, Exchange) or (pending := momenta.pending) is None:
            return
        momenta.pending = None
        by_group = list(zip(self.param_groups, pending.rates, strict=True))
        momenta.average(pending, {each: rate for group, rate in by_group for each in group["params"]}, self._local)
        for group, rate in by_group:
            exchanged = [parameter for parameter in group["params"] if parameter in pending.anchors]
            if exchanged:
                for weight, parameter in zip(local_parameters(exchanged), exchanged, strict=True):
                    weight.copy_(pending.anchors[parameter])
                roots = self._corrected(momenta.roots(exchanged, self._local), self.steps)
                self._add_updates(group, exchanged, roots, rate)
