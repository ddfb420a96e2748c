"""From a configuration and named parameters to a torch optimizer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gptlite.optimizer.config import AdamConfig, AdamWConfig, OptimizerConfig, SGDConfig
from gptlite.optimizer.fused import FusedAdam, FusedAdamW

# Where torch has one kernel for the whole update (a single pass over each parameter, its gradient and state).
FUSED_DEVICES = ("cpu", "cuda")


def build_optimizer(
    config: OptimizerConfig, parameters: Iterable[tuple[str, nn.Parameter]], fused_adam: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of `config` over named parameters (`model.named_parameters()`); frozen ones are left out.

    Matrices, embeddings among them, decay by `config.weight_decay`, and vectors (biases and norms) do not. Each group
    carries `names`, in the order of its `params`, and holds tensors of one mesh: a kernel over many takes no mixture.

    `fused_adam`: by our kernel, which must be loaded, where it is Adam or AdamW. Raises TypeError for a configuration
    class without a builder, ValueError if nothing is trainable.
    """
    groups = _parameter_groups(parameters, config.weight_decay)
    fused = all(parameter.device.type in FUSED_DEVICES for group in groups for parameter in group["params"])
    kernels: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
    match config:
        case AdamWConfig(lr=lr, eps=eps):
            kind = FusedAdamW if fused_adam else torch.optim.AdamW
            return kind(groups, lr=lr, betas=(config.beta1, config.beta2), eps=eps, **kernels)
        case AdamConfig(lr=lr, eps=eps):
            kind = FusedAdam if fused_adam else torch.optim.Adam
            return kind(groups, lr=lr, betas=(config.beta1, config.beta2), eps=eps, **kernels)
        case SGDConfig(lr=lr):
            if any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"]):
                kernels = {"foreach": True}  # torch has no fused SGD of DTensors
            return torch.optim.SGD(groups, lr=lr, momentum=config.momentum, nesterov=config.nesterov, **kernels)
    raise TypeError(f"no builder for {type(config).__name__}: add a case to build_optimizer")


def _parameter_groups(parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Split by number of dims: decaying a gain or a bias towards 0 regularises nothing, it shifts activations."""
    trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    groups: dict[Any, dict[str, Any]] = {}
    for vectors, decay in ((False, weight_decay), (True, 0.0)):
        for name, parameter in trainable:
            if (parameter.ndim < 2) == vectors:
                mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
                group = groups.setdefault((vectors, mesh), {"params": [], "names": [], "weight_decay": decay})
                group["params"].append(parameter)
                group["names"].append(name)
    return list(groups.values())
