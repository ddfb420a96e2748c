"""Lion (Chen et al. 2023, arXiv:2302.06675, program 1): the sign of an interpolated momentum."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import torch
from torch import Tensor

from gptlite.optimizer.base import BuildContext, OwnOptimizer, local_gradients, local_parameters
from gptlite.satellites.optimizers.configs import LionConfig
from gptlite.torch_private.ops import foreach_add_, foreach_lerp, foreach_lerp_, foreach_mul_, foreach_sign_


def build(config: LionConfig, context: BuildContext) -> Lion:
    """Return the optimizer of a configuration."""
    return Lion(context.groups, {"lr": config.lr, "betas": (config.beta1, config.beta2), "weight_decay": 0.0})


class Lion(OwnOptimizer):
    """Lion: x -= lr (sign(beta1 m + (1 - beta1) g) + weight_decay x), then m = beta2 m + (1 - beta2) g.

    The state is one moment, without a step count. The rule is elementwise and needs no communication.
    """

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a momentum of zeros."""
        return {"exp_avg": torch.zeros_like(parameter, dtype=torch.float32)}

    def update(self) -> None:
        """Take a step."""
        for group in self.param_groups:
            parameters = self.ready(group)
            if not parameters:
                continue
            (beta1, beta2), gradients = group["betas"], local_gradients(parameters)
            moments, weights = self.local_states(parameters, "exp_avg"), local_parameters(parameters)
            updates = foreach_lerp(moments, gradients, 1 - beta1)
            foreach_sign_(updates)
            foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            foreach_add_(weights, updates, alpha=-group["lr"])
            foreach_lerp_(moments, gradients, 1 - beta2)
