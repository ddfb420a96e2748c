"""LAMB (You et al. 2019, arXiv:1904.00962, algorithm 2): Adam's update, rescaled to the norm of the parameter."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gptlite.optimizer.base import BuildContext, OwnOptimizer, adam_state, local_gradients, local_parameters
from gptlite.optimizer.clip import square_norms
from gptlite.parallelism.boxes import cuts
from gptlite.parallelism.collectives import sum_over_cuts
from gptlite.satellites.optimizers.configs import LambConfig
from gptlite.torch_private.ops import (
    foreach_add_,
    foreach_addcmul_,
    foreach_div,
    foreach_div_,
    foreach_lerp_,
    foreach_mul_,
    foreach_sqrt_,
)


def build(config: LambConfig, context: BuildContext) -> Lamb:
    """Return the optimizer of a configuration."""
    betas = config.beta1, config.beta2
    defaults = {"lr": config.lr, "betas": betas, "eps": config.eps, "weight_decay": 0.0}
    return Lamb(context.groups, defaults, (config.min_trust, config.max_trust))


class Lamb(OwnOptimizer):
    """LAMB: a matrix x steps by lr u |x| / |u|, where u is Adam's update plus weight decay and norms are global.

    Vectors step by lr u, as in the authors' code, where parameters without weight decay are not rescaled. The norms of
    all matrices are reduced together, once per mesh axis. `trust` has the bounds of |x| / |u|.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        trust: tuple[float, float | None],
    ) -> None:
        super().__init__(groups, defaults)
        self.trust = trust

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return adam_state(parameter)

    def update(self) -> None:
        """Take a step."""
        groups = [(group, self.ready(group)) for group in self.param_groups]
        updates = [self._updates(group, parameters) for group, parameters in groups]
        parameters = [parameter for _, each in groups for parameter in each]
        if parameters:
            self.adapt(parameters, [update for each in updates for update in each])
        for (group, each), its in zip(groups, updates, strict=True):
            if each:
                foreach_add_(local_parameters(each), its, alpha=-group["lr"])

    def adapt(self, parameters: Sequence[nn.Parameter], updates: Sequence[Tensor]) -> None:
        """Rescale each matrix's update to the norm of the matrix, in place."""
        pairs = [(weight, update) for weight, update in zip(parameters, updates, strict=True) if weight.ndim > 1]
        if pairs:
            weights, changes = zip(*pairs, strict=True)
            self.rescale(weights, changes, trust_ratios(weights, changes, self.trust))

    def rescale(self, weights: Sequence[nn.Parameter], updates: Sequence[Tensor], ratios: Tensor) -> None:
        """Multiply each matrix's update by its trust ratio, in place."""
        foreach_mul_(updates, list(ratios.to(updates[0].dtype).unbind()))

    def _updates(self, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return m / (sqrt(v) + eps) + weight_decay x, with bias-corrected moments."""
        if not parameters:
            return []
        (beta1, beta2), gradients = group["betas"], local_gradients(parameters)
        steps = self.counted(parameters)
        first, second = (self.local_states(parameters, key) for key in ("exp_avg", "exp_avg_sq"))
        foreach_lerp_(first, gradients, 1 - beta1)
        foreach_mul_(second, beta2)
        foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        roots = foreach_div(second, [1 - beta2**step for step in steps])
        foreach_sqrt_(roots)
        foreach_add_(roots, group["eps"])
        updates = foreach_div(first, [1 - beta1**step for step in steps])
        foreach_div_(updates, roots)
        if group["weight_decay"]:
            foreach_add_(updates, local_parameters(parameters), alpha=group["weight_decay"])
        return list(updates)


def trust_ratios(
    weights: Sequence[nn.Parameter], updates: Sequence[Tensor], trust: tuple[float, float | None]
) -> Tensor:
    """Return the norm of each matrix over the norm of its update [len(weights)], fp64, within `trust`; 1 if either norm
    is 0. Does not synchronize."""
    squares = torch.stack([square_norms(local_parameters(weights)), square_norms(updates)], 1)
    squares = torch.stack(sum_over_cuts(squares.unbind(), [cuts(weight) for weight in weights]))  # a reduction per axis
    size, length = squares.sqrt().unbind(1)
    return torch.where((size > 0) & (length > 0), (size / length).clamp(*trust), 1.0)
