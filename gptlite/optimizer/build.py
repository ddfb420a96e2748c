"""From a configuration and named parameters to a torch optimizer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gptlite.optimizer.base import BuildContext
from gptlite.optimizer.config import OptimizerConfig

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

    The module `config.rule` builds it. A rule that tells parameters apart has `group_keys(edges, name, parameter)`, by
    which groups are split further. `fused_adam`: by our kernel, which must be loaded, where it is Adam or AdamW. Muon
    leaves matrices whose names end in one of `edges` to AdamW, as they are no linear map between hidden activations,
    and takes those apart whose names end in a key of `stacked`: so many groups of so many matrices in one. Raises
    ValueError if nothing is trainable.
    """
    rule = import_module(config.rule)
    keys = getattr(rule, "group_keys", None)
    groups = _parameter_groups(parameters, config.weight_decay, keys and partial(keys, tuple(edges)))
    fused = all(parameter.device.type in FUSED_DEVICES for group in groups for parameter in group["params"])
    kernels: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
    return rule.build(config, BuildContext(groups, fused_adam, kernels, stacked or {}))


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
