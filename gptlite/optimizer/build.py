"""Construction of a torch optimizer from a configuration and named parameters."""

from collections.abc import Callable, Collection, Iterable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gptlite.ops.matrices import Matrices
from gptlite.optimizer.base import BuildContext
from gptlite.optimizer.config import OptimizerConfig

# Devices on which torch computes the whole update in one pass over each parameter, its gradient and state.
FUSED_DEVICES = ("cpu", "cuda")
NO_MATRICES = Matrices()


def build_optimizer(
    config: OptimizerConfig,
    parameters: Iterable[tuple[str, nn.Parameter]],
    matrices: Matrices = NO_MATRICES,
    fused_adam: bool = False,
    dtype: torch.dtype = torch.float32,
) -> torch.optim.Optimizer:
    """Return the optimizer of `config` for those named parameters (`model.named_parameters()`) that are not frozen.

    Matrices, including embeddings, decay by `config.weight_decay`; vectors (biases and norms) do not decay. Each group
    carries `names`, in the order of its `params`. The tensors of a group are on one mesh, since multi-tensor kernels do
    not accept a mix of meshes.

    The module `config.rule` builds the optimizer. If the rule has `group_keys(edges, batched, name, parameter)`, groups
    are split further by the returned values. `matrices` is the structure by which Muon splits parameters and leaves
    some to AdamW, since they are not linear maps between hidden activations. `fused_adam` selects our kernel for Adam
    and AdamW; it must be loaded. `dtype` is the dtype of the model's GEMMs; with `newton_schulz_dtype: auto`, Muon's
    GEMMs are in bf16 if the model's are. Raises ValueError if nothing is trainable.
    """
    rule, parameters = import_module(config.rule), list(parameters)
    keys = getattr(rule, "group_keys", None)
    left = config.left_to_adamw((name for name, _ in parameters), matrices.embeddings)
    more = None if keys is None else partial(_keys, keys, matrices, left)
    groups = _parameter_groups(parameters, config.weight_decay, more)
    fused = all(parameter.device.type in FUSED_DEVICES for group in groups for parameter in group["params"])
    kernels: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
    return rule.build(config, BuildContext(groups, fused_adam, kernels, matrices.fused or {}, dtype))


def _keys(
    keys: Callable[..., dict[str, Any]], matrices: Matrices, left: Collection[str], name: str, parameter: nn.Parameter
) -> dict[str, Any]:
    """Call a rule's `group_keys` for a parameter; a name in `left` is an edge by itself."""
    edges, batched = ((name,), ()) if name in left else (tuple(matrices.edges), tuple(matrices.batched))
    return keys(edges, batched, name, parameter)


def _parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    more: Callable[[str, nn.Parameter], dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups, split by number of dims, by mesh and by the values that `more` returns.

    Vectors do not decay, since decaying a gain or a bias towards 0 shifts activations instead of regularizing. The
    values of `more` become entries of the group.
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
