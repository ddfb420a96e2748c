"""NVIDIA Apex's FusedAdam and FusedLAMB, applied to this rank's shard of each parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gptlite.optimizer.base import BuildContext, OwnOptimizer, adam_state, local_gradients, local_parameters
from gptlite.satellites.optimizers.configs import ApexAdamConfig, ApexLambConfig


def build(config: ApexAdamConfig | ApexLambConfig, context: BuildContext) -> ApexOptimizer:
    """Return the optimizer of a configuration."""
    optimizers = import_module("apex.optimizers")  # `check_optimizer` has verified the installation
    options: dict[str, Any] = {"betas": (config.beta1, config.beta2), "eps": config.eps}
    if isinstance(config, ApexAdamConfig):
        return ApexOptimizer(context.groups, optimizers.FusedAdam, config.lr, options | {"adam_w_mode": True})
    # FusedLAMB clips by the norm of this rank's gradients. An infinite limit turns that off.
    return ApexOptimizer(context.groups, optimizers.FusedLAMB, config.lr, options | {"max_grad_norm": math.inf})


class ApexOptimizer(OwnOptimizer):
    """Wrapper of the Apex class `kind`, created with `options`. Checkpoints are compatible with AdamW and LAMB.

    Apex does not support DTensors, and counts steps per group. The local tensors are passed to Apex in each step,
    since FSDP2 may move their storage.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], kind: Callable[..., Optimizer], lr: float, options: dict[str, Any]
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        local = [
            {"params": local_parameters(group["params"]), "weight_decay": group["weight_decay"]}
            for group in self.param_groups
        ]
        self.inner = kind(local, lr=lr, **options)

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return adam_state(parameter)

    def update(self) -> None:
        """Take a step."""
        for mine, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            parameters = self.ready(mine)
            local = local_parameters(parameters)
            inner_group["params"], inner_group["lr"] = local, mine["lr"]
            inner_group["step"] = max(self.counted(parameters), default=1) - 1  # steps already taken
            states = zip(*(self.local_states(parameters, key) for key in ("exp_avg", "exp_avg_sq")), strict=True)
            for tensor, gradient, (first, second) in zip(local, local_gradients(parameters), states, strict=True):
                tensor.grad = gradient
                self.inner.state[tensor] = {"exp_avg": first, "exp_avg_sq": second}
        self.inner.step()
        self.inner.state.clear()
        for inner_group in self.inner.param_groups:
            inner_group["params"] = []
