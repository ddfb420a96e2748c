"""Adam and AdamW by our kernel: one pass over all tensors, which scales the gradients as it reads them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from gptlite.optimizer.base import refuse
from gptlite.optimizer.clip import clip_factor, clip_gradients
from gptlite.optimizer.state import materialized
from gptlite.parallelism.zero import local_tensor


class FusedStep:
    """What replaces the step of torch's Adam. State, and so checkpoints, are as torch's fused kernel has them.

    `scale`, 0-dim, multiplies the gradients; where `found_inf`, 0-dim, is not 0, nothing changes. The device is not
    waited for.
    """

    param_groups: list[dict[str, Any]]

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Raises ValueError for a closure."""
        refuse(closure)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [materialized(self, parameter) for parameter in parameters]  # type: ignore[arg-type]
            torch.ops.gptlite.adamw_(
                _local(parameters),
                _local(p.grad for p in parameters),
                *(_local(state[key] for state in states) for key in ("exp_avg", "exp_avg_sq", "step")),
                float(group["lr"]),
                *group["betas"],
                group["eps"],
                group["weight_decay"],
                not group["decoupled_weight_decay"],
                scale,
                found_inf,
            )
            torch.autograd.graph.increment_version(parameters)  # as torch's own do: a graph that kept one is told


class FusedAdam(FusedStep, Adam):
    """torch.optim.Adam with that step."""


class FusedAdamW(FusedStep, AdamW):
    """torch.optim.AdamW with that step."""


def clip_and_step(
    optimizer: Optimizer,
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm: Tensor,
    loss_scale: float = 1.0,
) -> None:
    """Takes the step with gradients scaled as their `norm` comes down to `max_norm`; 0 leaves them.

    Gradients and norm are of the loss times `loss_scale`, which is divided out; `max_norm` is without it. The fused
    step leaves the gradients themselves as they are.
    """
    if isinstance(optimizer, FusedAdam | FusedAdamW):
        held = next((tensor for group in optimizer.param_groups for tensor in group["params"]), norm)
        optimizer.step(scale=clip_factor(max_norm, norm.to(local_tensor(held).device), loss_scale))
    else:
        clip_gradients(parameters, max_norm, norm, loss_scale)
        optimizer.step()


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [local_tensor(tensor) for tensor in tensors]
