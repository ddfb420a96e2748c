"""1-bit LAMB (Li et al. 2021, arXiv:2104.06069, algorithm 1).

In the warm-up, LAMB's own steps, a running mean is kept of each matrix's trust ratio. Later it is multiplied by a
factor that follows the second moments of the exchanged momenta, as the frozen ones do not change. A vector has no trust
ratio, and steps by this factor alone. Means and moments have LAMB's corrections of their bias. DeepSpeed also rescales
momenta to equal sizes before it exchanges them, because it has one scale for all of them; here every block has one.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptlite.optimizer.base import BuildContext, local_gradients, local_parameters
from gptlite.optimizer.clip import square_norms
from gptlite.parallelism.boxes import ShardedDim, cuts, local_tensor
from gptlite.parallelism.collectives import sum_over_cuts
from gptlite.satellites.onebit.configs import OneBitLambConfig
from gptlite.satellites.onebit.momenta import Momenta
from gptlite.satellites.optimizers.lamb import Lamb
from gptlite.torch_private.ops import foreach_mul_


def build(config: OneBitLambConfig, context: BuildContext) -> OneBitLamb:
    """Return the optimizer of a configuration. One that is not `completed`, as in a plan, has a warm-up of one step."""
    return OneBitLamb(context.groups, config)


class OneBitLamb(Lamb):
    """LAMB up to `config.freeze_step`, and LAMB with exchanged momenta and frozen second moments after it.

    A step is collective over the data ranks, once `momenta` is an Exchange. State, beyond LAMB's: `fresh_avg_sq`, the
    second moments of the exchanged momenta; `trust_avg`, the running mean of the trust ratio; `factor`, its factor.
    """

    scales_gradients = True

    def __init__(self, groups: Iterable[dict[str, Any]], config: OneBitLambConfig) -> None:
        defaults = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps, "weight_decay": 0.0}
        super().__init__(groups, defaults, (config.min_trust, config.max_trust))
        self.config, self.last, self.momenta = config, config.freeze_step or 1, Momenta()

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return LAMB's state with the values for the steps after the warm-up."""
        zero = torch.zeros((), device=parameter.device)
        more = {"fresh_avg_sq": torch.zeros_like(parameter), "trust_avg": zero, "factor": zero + 1}
        return super().new_state(parameter) | more

    @property
    def steps(self) -> int:
        """Number of steps taken."""
        return int(self.state_of(self.param_groups[0]["params"][0])["step"])

    @property
    def exchanges(self) -> bool:
        """True if the next step exchanges momenta, instead of summed gradients."""
        return self.steps >= self.last

    @torch.no_grad()
    def step(self, closure: None = None, *, scale: Tensor | None = None, found_inf: None = None) -> None:  # type: ignore[override]
        """Take a step with gradients that are multiplied by the scalar tensor `scale`."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if self.exchanges:
            self._exchange(parameters, scale)
            return
        if scale is not None and (gradients := local_gradients(parameters)):
            foreach_mul_(gradients, scale.to(gradients[0].device))
        self.update()

    def rescale(self, weights: Sequence[nn.Parameter], updates: Sequence[Tensor], ratios: Tensor) -> None:
        """Multiply each matrix's update by its trust ratio, in place, and add the ratio to its running mean."""
        super().rescale(weights, updates, ratios)
        for weight, ratio in zip(weights, ratios.unbind(), strict=True):
            mean = self.state[weight]["trust_avg"]
            mean.lerp_(ratio.to(mean.dtype), 1 - self.config.coeff_beta)

    def _exchange(self, parameters: list[nn.Parameter], scale: Tensor | None) -> None:
        """Take a step with exchanged momenta."""
        (beta1, beta2), eps = self.param_groups[0]["betas"], self.param_groups[0]["eps"]
        former = [first.clone() for first in self.local_states(parameters, "exp_avg")]
        if self.steps == self.last:
            for parameter in parameters:
                state = self.state_of(parameter)
                local_tensor(state["fresh_avg_sq"]).copy_(local_tensor(state["exp_avg_sq"]))
        self.momenta.advance(parameters, self._local, beta1, scale)
        (step, *_) = self.counted(parameters)
        updates, ratios = [], []
        frozen = self.momenta.roots(parameters, self._local)
        for parameter, before, root in zip(parameters, former, frozen, strict=True):
            first, fresh = self._local(parameter, "exp_avg"), self._local(parameter, "fresh_avg_sq")
            gradient = before.mul_(-beta1).add_(first).div_(1 - beta1)  # that an exact exchange would have given m
            fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            roots = (root / math.sqrt(1 - beta2**self.last)).add_(eps)
            updates.append(first / (1 - beta1**step) / roots)
            ratio = roots / (fresh / (1 - beta2**step)).sqrt_().add_(eps)
            ratios.append(torch.where(first != 0, ratio, 0.0).max() if ratio.numel() else ratio.new_zeros(()))
        self._move(parameters, updates, torch.stack(ratios))

    def _move(self, parameters: list[nn.Parameter], updates: list[Tensor], ratios: Tensor) -> None:
        """Update the parameters by Adam's updates, and their factors by the largest ratios of frozen to fresh roots,
        which cover this rank's shards."""
        config, sharded = self.config, [cuts(parameter) for parameter in parameters]
        plain, weights = square_norms(updates), local_parameters(parameters)
        decays = [group["weight_decay"] for group in self.param_groups for _ in group["params"]]
        for update, weight, decay in zip(updates, weights, decays, strict=True):
            update.add_(weight, alpha=decay)
        squares = sum_over_cuts(torch.stack([plain, square_norms(updates)], 1).unbind(), sharded)
        plain, decayed = torch.stack(squares).unbind(1)
        share = torch.where(decayed > 0, (plain / decayed).sqrt().clamp(max=1), 1.0).float()
        ratios = _max_over_cuts(ratios, sharded)
        former = torch.stack([self.state[parameter]["factor"] for parameter in parameters])
        factors = (ratios * share + (1 - share)).clamp(config.factor_min, config.factor_max)
        change = former * config.factor_threshold
        factors = torch.where(ratios > 0, factors.clamp(former - change, former + change), former)
        debias = 1 - config.coeff_beta**self.last
        rates = [group["lr"] for group in self.param_groups for _ in group["params"]]
        for at, parameter in enumerate(parameters):
            state = self.state[parameter]
            state["factor"].copy_(factors[at])
            trust = state["trust_avg"] / debias * factors[at] if parameter.ndim > 1 else factors[at]
            weights[at].sub_(updates[at].mul_(trust * rates[at]))

    def _local(self, parameter: Tensor, key: str) -> Tensor:
        """Return this rank's part of a state tensor."""
        return local_tensor(self.state_of(parameter)[key])


def _max_over_cuts(values: Tensor, sharded: Sequence[Sequence[ShardedDim]]) -> Tensor:
    """Return the largest value [n] of each parameter over the ranks that hold its shards. Collective."""
    axes = {cut.axis: cut for each in sharded for cut in each}
    for axis, cut in sorted(axes.items()):  # sorted: all ranks must issue the collectives in the same order
        places = [at for at, each in enumerate(sharded) if any(other.axis == axis for other in each)]
        largest = values[places]
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=cut.group)
        values[places] = largest
    return values
