"""AdamW, Adam and SGD, computed by torch's classes or by our kernel."""

import torch
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW

from gptlite.optimizer.base import BuildContext
from gptlite.optimizer.config import AdamConfig, AdamWConfig, OptimizerConfig, SGDConfig
from gptlite.optimizer.fused import FusedAdam, FusedAdamW


def build(config: OptimizerConfig, context: BuildContext) -> torch.optim.Optimizer:
    """Return the optimizer of a configuration. Raises TypeError for a class without a rule."""
    groups, kernels = context.groups, context.kernels
    if isinstance(config, AdamWConfig | AdamConfig):
        kinds = (AdamW, FusedAdamW) if isinstance(config, AdamWConfig) else (Adam, FusedAdam)
        betas = config.beta1, config.beta2
        return kinds[context.fused_adam](groups, lr=config.lr, betas=betas, eps=config.eps, **kernels)
    if isinstance(config, SGDConfig):
        if any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"]):
            kernels = {"foreach": True}  # torch has no fused SGD of DTensors
        return SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, **kernels)
    raise TypeError(f"no builder for {type(config).__name__}: set its `rule` to the module that has one")
