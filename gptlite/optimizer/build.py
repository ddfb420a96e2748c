"""From a configuration and named parameters to a torch optimizer."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gptlite.optimizer.adafactor import Adafactor
from gptlite.optimizer.adamw_8bit import AdamW8bit
from gptlite.optimizer.apex import ApexOptimizer
from gptlite.optimizer.config import (
    AdafactorConfig,
    AdamConfig,
    AdamW8bitConfig,
    AdamWConfig,
    ApexAdamConfig,
    ApexLambConfig,
    LambConfig,
    LionConfig,
    MuonConfig,
    MuonDtype,
    MuonScale,
    OptimizerConfig,
    SGDConfig,
)
from gptlite.optimizer.fused import FusedAdam, FusedAdamW
from gptlite.optimizer.lamb import Lamb
from gptlite.optimizer.lion import Lion
from gptlite.optimizer.muon import Muon, Stack

# Where torch has one kernel for the whole update (a single pass over each parameter, its gradient and state).
FUSED_DEVICES = ("cpu", "cuda")


def build_optimizer(
    config: OptimizerConfig,
    parameters: Iterable[tuple[str, nn.Parameter]],
    fused_adam: bool = False,
    edges: Sequence[str] = (),
    stacked: Mapping[str, tuple[int, int]] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of `config` over named parameters (`model.named_parameters()`); frozen ones are left out.

    Matrices, embeddings among them, decay by `config.weight_decay`, and vectors (biases and norms) do not. Each group
    carries `names`, in the order of its `params`, and holds tensors of one mesh: a kernel over many takes no mixture.

    `fused_adam`: by our kernel, which must be loaded, where it is Adam or AdamW. Muon leaves matrices whose
    names end in one of `edges` to AdamW, as they are no linear map between hidden activations, and takes those apart
    whose names end in a key of `stacked`: so many groups of so many matrices in one. Raises TypeError for a
    configuration class without a builder, ValueError if nothing is trainable.
    """
    groups = _parameter_groups(
        parameters, config.weight_decay, partial(_muon, tuple(edges)) if isinstance(config, MuonConfig) else None
    )
    fused = all(parameter.device.type in FUSED_DEVICES for group in groups for parameter in group["params"])
    kernels: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
    match config:
        case ApexAdamConfig(lr=lr, eps=eps):
            options = {"betas": (config.beta1, config.beta2), "eps": eps, "adam_w_mode": True}
            return ApexOptimizer(groups, _apex("FusedAdam"), lr, options)
        case ApexLambConfig(lr=lr, eps=eps):
            # It clips by itself, by a norm of this rank's gradients, unless its limit cannot be reached.
            options = {"betas": (config.beta1, config.beta2), "eps": eps, "max_grad_norm": math.inf}
            return ApexOptimizer(groups, _apex("FusedLAMB"), lr, options)
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
        case LambConfig(lr=lr, eps=eps):
            return Lamb(groups, lr=lr, betas=(config.beta1, config.beta2), eps=eps)
        case AdamW8bitConfig(lr=lr, eps=eps):
            return AdamW8bit(groups, lr=lr, betas=(config.beta1, config.beta2), eps=eps)
        case LionConfig(lr=lr):
            return Lion(groups, lr=lr, betas=(config.beta1, config.beta2))
        case AdafactorConfig(lr=lr, decay=decay, clip_threshold=clip):
            return Adafactor(groups, lr=lr, decay=decay, clip_threshold=clip, eps=(config.eps1, config.eps2))
        case MuonConfig():
            adamw = {"betas": (config.beta1, config.beta2), "eps": config.eps, **kernels}
            return _build_muon(config, groups, FusedAdamW if fused_adam else torch.optim.AdamW, adamw, stacked or {})
    raise TypeError(f"no builder for {type(config).__name__}: add a case to build_optimizer")


def _apex(name: str) -> type[torch.optim.Optimizer]:
    """A class of Apex, which `check_optimizer` has found."""
    return getattr(import_module("apex.optimizers"), name)


def _build_muon(
    config: MuonConfig,
    groups: list[dict[str, Any]],
    adamw: type[torch.optim.AdamW],
    adamw_options: dict[str, Any],
    stacked: Mapping[str, tuple[int, int]],
) -> Muon:
    names = [name for group in groups for name in group["names"]]
    return Muon(
        groups,
        adamw,
        adamw_options,
        lr=config.lr,
        adamw_lr_ratio=config.adamw_lr_ratio,
        momentum=config.momentum,
        nesterov=config.nesterov,
        steps=config.newton_schulz_steps,
        dtype=torch.bfloat16 if config.newton_schulz_dtype is MuonDtype.bf16 else torch.float32,
        match_rms_adamw=config.scale is MuonScale.match_rms_adamw,
        stacks={name: Stack(*sizes) for name in names for end, sizes in stacked.items() if name.endswith(end)},
    )


def _muon(edges: tuple[str, ...], name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """Whether Muon steps a parameter itself."""
    return {"muon": parameter.ndim == 2 and not name.endswith(edges)}


def _parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    more: Callable[[str, nn.Parameter], dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Split by number of dims: decaying a gain or a bias towards 0 regularises nothing, it shifts activations.

    And by what `more` says of a parameter, which the group then says.
    """
    trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    groups: dict[Any, dict[str, Any]] = {}
    for vectors, decay in ((False, weight_decay), (True, 0.0)):
        for name, parameter in trainable:
            if (parameter.ndim < 2) == vectors:
                mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
                its = {} if more is None else more(name, parameter)
                new = {"params": [], "names": [], "weight_decay": decay, **its}
                group = groups.setdefault((vectors, mesh, *its.values()), new)
                group["params"].append(parameter)
                group["names"].append(name)
    return list(groups.values())
