"""Adam and AdamW in our kernel: one pass over all tensors, which also scales the gradients."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer

from gptlite.ops.weight_copies import copy_of, mark_written
from gptlite.optimizer.base import Closure, OwnOptimizer, PiecewiseOptimizer, local_gradients, refuse, rule_of
from gptlite.optimizer.clip import clip_factor, clip_gradients, local_grad_norm
from gptlite.optimizer.state import materialized
from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.in_files import InFiles


class FusedStep:
    """Replacement for the step of torch's Adam. State and checkpoints have the format of torch's fused kernel.

    The same pass writes the 16-bit copies of weights that have them (ops/weight_copies.py).

    The gradients are multiplied by the scalar tensor `scale`. If the scalar tensor `found_inf` is not 0, the step
    changes nothing. The learning rate may be an fp64 tensor. The host does not wait for the device.
    """

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]

    @torch.no_grad()
    def step(
        self, closure: Closure | None = None, *, scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        """Take a step. Raises ValueError for a closure."""
        refuse(closure)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[each] or materialized(self, each) for each in parameters]  # type: ignore[arg-type]
            copies = [copy_of(parameter) for parameter in parameters]
            copied = [each for each, copy in zip(parameters, copies, strict=True) if copy is not None]
            torch.ops.gptlite.adamw_(
                [local_tensor(parameter) for parameter in parameters],
                local_gradients(parameters),
                *([local_tensor(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq", "step")),
                0.0 if isinstance(group["lr"], Tensor) else float(group["lr"]),
                *group["betas"],
                group["eps"],
                group["weight_decay"],
                not group["decoupled_weight_decay"],
                scale,
                found_inf,
                # The op's list cannot contain None.
                [parameters[0].new_empty(0) if copy is None else copy for copy in copies] if copied else None,
                group["lr"] if isinstance(group["lr"], Tensor) else None,
            )
            torch.autograd.graph.increment_version(parameters)  # autograd detects stale saved tensors by the version
            mark_written(copied)


class FusedAdam(FusedStep, Adam):
    """torch.optim.Adam with the fused step."""


class FusedAdamW(FusedStep, AdamW):
    """torch.optim.AdamW with the fused step."""


def is_fused(optimizer: Optimizer) -> bool:
    """Return True if our kernel computes the step, which then accepts a `scale`."""
    return isinstance(rule_of(optimizer), FusedStep)


def writes_copies(optimizer: Optimizer) -> bool:
    """Return True if a step updates the 16-bit weight copies, or makes them stale by changing the weights' versions.
    torch's fused kernels do neither, so the copies would seem valid after their steps."""
    adam = getattr(optimizer, "adamw", optimizer)  # Muon's AdamW, if any; Muon changes the versions of its matrices
    return type(adam) in (FusedAdam, FusedAdamW)


def decides_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Return True if `clip_and_step` can skip a step because of `found_inf`, a tensor that the host does not read.

    This holds for Adam and AdamW, with our kernel or torch's fused one, and for Muon with our kernel, if parameters are
    on `device`. Piecewise steps (rounding to bf16, state in files) and all other rules need the value on the host.
    torch's fused kernel does not accept found_inf for DTensors.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter.device.type != device.type for parameter in parameters):
        return False
    if type(optimizer) in (FusedAdam, FusedAdamW) or (
        isinstance(optimizer, OwnOptimizer) and optimizer.skips_on_device
    ):
        return True
    cut = any(isinstance(parameter, DTensor) for parameter in parameters)
    return type(optimizer) in (Adam, AdamW) and bool(optimizer.defaults["fused"]) and not cut


def grad_norm(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the L2 norm of this rank's gradient shards of the parameters: see `local_grad_norm`."""
    if isinstance(optimizer, InFiles):
        return optimizer.grad_norm(parameters)
    return local_grad_norm(parameters, is_fused(optimizer))


def clip_and_step(
    optimizer: Optimizer,
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm: Tensor,
    loss_scale: float | Tensor = 1.0,
    found_inf: Tensor | None = None,
) -> None:
    """Take a step with gradients clipped to `max_norm` by their global `norm`. A `max_norm` of 0 turns clipping off.

    Gradients and norm are those of the loss times `loss_scale`, which is divided out; `max_norm` refers to the unscaled
    loss. The fused step does not modify the gradients. If the scalar fp32 tensor `found_inf` is not 0, only the
    gradients may change; passing it requires `decides_on_device`.
    """
    if is_fused(optimizer) or (isinstance(optimizer, OwnOptimizer | PiecewiseOptimizer) and optimizer.scales_gradients):
        held = next((tensor for group in optimizer.param_groups for tensor in group["params"]), norm)
        # Offloaded parameters are on the host, but a norm that was summed over ranks is on the device.
        factor = clip_factor(max_norm, norm.to(local_tensor(held).device), loss_scale)
        optimizer.step(scale=factor, found_inf=found_inf)  # type: ignore[call-arg]
    else:
        clip_gradients(parameters, max_norm, norm, loss_scale)
        if found_inf is None:
            optimizer.step()
        else:
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]  # torch's GradScaler passes it this way
            optimizer.step()
            del optimizer.found_inf  # type: ignore[attr-defined]
