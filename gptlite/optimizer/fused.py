"""Adam and AdamW by our kernel: one pass over all tensors, which scales the gradients as it reads them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer

from gptlite.ops.weight_copies import copy_of, mark_written
from gptlite.optimizer.base import Closure, refuse
from gptlite.optimizer.clip import clip_factor, clip_gradients
from gptlite.optimizer.state import materialized
from gptlite.parallelism.zero import local_tensor


class FusedStep:
    """What replaces the step of torch's Adam. State, and so checkpoints, are as torch's fused kernel has them.

    Weights that have 16-bit copies (ops/weight_copies.py) have them written in the same pass.

    `scale`, 0-dim, multiplies the gradients; where `found_inf`, 0-dim, is not 0, nothing changes. The device is not
    waited for.
    """

    param_groups: list[dict[str, Any]]

    @torch.no_grad()
    def step(
        self, closure: Closure | None = None, *, scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        """Raises ValueError for a closure."""
        refuse(closure)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [materialized(self, parameter) for parameter in parameters]  # type: ignore[arg-type]
            copies = [copy_of(parameter) for parameter in parameters]
            copied = [each for each, copy in zip(parameters, copies, strict=True) if copy is not None]
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
                [parameters[0].new_empty(0) if copy is None else copy for copy in copies] if copied else None,
            )
            torch.autograd.graph.increment_version(parameters)  # a graph that kept one is told
            mark_written(copied)


class FusedAdam(FusedStep, Adam):
    """torch.optim.Adam with that step."""


class FusedAdamW(FusedStep, AdamW):
    """torch.optim.AdamW with that step."""


def writes_copies(optimizer: Optimizer) -> bool:
    """Whether a step leaves no 16-bit copy of a weight stale, or tells that it does: torch's fused kernels do neither,
    as they change no version."""
    return type(optimizer) in (FusedAdam, FusedAdamW)


def decides_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether `clip_and_step` can leave out a step by a tensor, `found_inf`, which the host does not read.

    By Adam and AdamW, of our kernel or torch's fused one, with parameters on `device`. What takes their steps apart
    (rounded to bf16, state in files) and all other rules need to know on the host. Torch's takes no found_inf of
    DTensors.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter.device.type != device.type for parameter in parameters):
        return False
    if type(optimizer) in (FusedAdam, FusedAdamW):
        return True
    cut = any(isinstance(parameter, DTensor) for parameter in parameters)
    return type(optimizer) in (Adam, AdamW) and bool(optimizer.defaults["fused"]) and not cut


def clip_and_step(
    optimizer: Optimizer,
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm: Tensor,
    loss_scale: float | Tensor = 1.0,
    found_inf: Tensor | None = None,
) -> None:
    """Takes the step with gradients scaled as their `norm` comes down to `max_norm`; 0 leaves them.

    Gradients and norm are of the loss times `loss_scale`, which is divided out; `max_norm` is without it. The fused
    step leaves the gradients themselves as they are. Where `found_inf`, 0-dim fp32, is not 0, nothing but they changes:
    for an optimizer that `decides_on_device`.
    """
    if isinstance(optimizer, FusedAdam | FusedAdamW):
        held = next((tensor for group in optimizer.param_groups for tensor in group["params"]), norm)
        factor = clip_factor(max_norm, norm.to(local_tensor(held).device), loss_scale)
        optimizer.step(scale=factor, found_inf=found_inf)
    else:
        clip_gradients(parameters, max_norm, norm, loss_scale)
        if found_inf is None:
            optimizer.step()
        else:
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]  # how torch's GradScaler says it
            optimizer.step()
            del optimizer.found_inf  # type: ignore[attr-defined]


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [local_tensor(tensor) for tensor in tensors]
