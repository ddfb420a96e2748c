"""An optimizer of one's own in one file: the sign of a momentum (signum, Bernstein et al. 2018, arXiv:1802.04434)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gptlite.optimizer.base import BuildContext, OwnOptimizer, local_gradients, local_parameters
from gptlite.optimizer.config import OptimizerConfig, require
from gptlite.optimizer.registry import register_optimizer


@dataclass
class SignumConfig(OptimizerConfig):
    """Momentum, then its sign."""

    rule: ClassVar[str] = __name__
    moments: ClassVar[int] = 1
    counts: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True

    lr: float = 1e-3
    momentum: float = 0.9

    def check(self) -> None:
        """Raises ConfigError for values out of range."""
        super().check()
        require(0 <= self.momentum < 1, "optimizer.momentum", self.momentum, "must be in [0, 1), e.g. 0.9")


def build(config: SignumConfig, context: BuildContext) -> "Signum":
    """The optimizer of a configuration."""
    return Signum(context.groups, {"lr": config.lr, "momentum": config.momentum, "weight_decay": 0.0})


class Signum(OwnOptimizer):
    """m = momentum m + g, then x -= lr (sign(m) + weight_decay x)."""

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The momentum."""
        return {"momentum": torch.zeros_like(parameter, dtype=torch.float32)}

    def update(self) -> None:
        """Takes a step."""
        for group in self.param_groups:
            parameters = self.ready(group)
            for x, g, m in zip(
                local_parameters(parameters),
                local_gradients(parameters),
                self.local_states(parameters, "momentum"),
                strict=True,
            ):
                m.mul_(group["momentum"]).add_(g)
                x.mul_(1 - group["lr"] * group["weight_decay"]).sub_(m.sign(), alpha=group["lr"])


register_optimizer("signum", SignumConfig)
