"""Construction of a torch optimizer from a configuration and named parameters."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gptlite.optimizer.base import BuildContext
from gptlite.optimizer.config import OptimizerConfig

# Devices on which torch computes the whole update in one pass over each parameter, its gradient and state.
FUSED_DEVICES = ("cpu", "cuda")


def build_optimizer(
    config: OptimizerConfig,
    parameters: Iterable[tuple[str, nn.Parameter]],
    fused_adam: bool = False,
    edges: Sequence[str] = (),
    stacked: Mapping[str, tuple[int, tuple[int, ...]]] | None = None,
    dtype: torch.dtype = torch.float32,
    batched: Sequence[str] = (),
    others: Collection[str] = (),
) -> torch.optim.Optimizer:
    """Return the optimizer of `config` for those named parameters (`model.named_parameters()`) that are not frozen.

    Matrices, including embeddings, decay by `config.weight_decay`; vectors (biases and norms) do not decay. Each group
    carries `names`, in the order of its `params`. The tensors of a group are on one mesh, since multi-tensor kernels do
    not accept a mix of meshes.

    The module `config.rule` builds the optimizer. If the rule has `group_keys(edges, batched, name, parameter)`, groups
    are split further by the returned values. `fused_adam` selects our kernel for Adam and AdamW; it must be loaded.
    Muon leaves matrices whose names end in one of `edges` or are in `others` to AdamW, since they are not linear maps
    between hidden activations. `stacked` maps name endings of fused parameters to (groups, relative rows of each matrix
    in a group), by which Muon splits them; `batched` are name endings of parameters [experts, rows, columns] with one
    matrix per expert. `dtype` is the dtype of the model's GEMMs; with `newton_schulz_dtype: auto`, Muon's GEMMs are in
    bf16 if the model's are. Raises ValueError if nothing is trainable.
    """
    rule = import_module(config.rule)
    keys = getattr(rule, "group_keys", None)
    more = None if keys is None else partial(_keys, keys, tuple(edges), tuple(batched), others)
    groups = _parameter_groups(parameters, config.weight_decay, more)
    fused = all(parameter.device.type in FUSED_DEVICES for group in groups for parameter in group["params"])
    kernels: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
    return rule.build(config, BuildContext(groups, fused_adam, kernels, stacked or {}, dtype))


def _keys(
    keys: Callable[..., dict[str, Any]],
    edges: tuple[str, ...],
    batched: tuple[str, ...],
    others: Collection[str],
    name: str,
    parameter: nn.Parameter,
) -> dict[str, Any]:
    """Call a rule's `group_keys` for a parameter; a name in `others` is an edge by itself."""
    return keys((name,), (), name, parameter) if name in others else keys(edges, batched, name, parameter)


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
