"""An optimizer's state as flat tensors with global names, the form a checkpoint stores.

A key is `optim.<parameter name>.<state name>`, e.g. `optim.layers.0.attn.qkv.weight.exp_avg`. Unlike torch's
`state_dict` it numbers nothing, so it does not depend on the order or the grouping of parameters.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from gptlite.optimizer.base import OwnOptimizer
from gptlite.parallelism.state_file import InFiles


def optimizer_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """The live state tensors by key: writing into them changes the optimizer. State in 8 bits is copied to fp32 ones,
    for `take_optimizer_state` to take back.

    What torch would create at the first step is created here where it is missing, with the value it starts
    from, so that a checkpoint can be read into a fresh optimizer in place. Moments have the parameter's shape,
    Adafactor's factors that of a row or a column, `step` is 0-dim fp32. State in files is mapped from them.
    """
    if isinstance(optimizer, InFiles):
        optimizer.settle()
    tensors: dict[str, Tensor] = {}
    for name, parameter in _named_parameters(optimizer):
        for key, value in _stored(optimizer, parameter).items():
            tensors.setdefault(f"optim.{name}.{key}", value)  # of two copies of a parameter, the first
    return tensors


def take_optimizer_state(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """To be called after writing into what `optimizer_state` gave, for what of it was a copy."""
    if isinstance(optimizer, OwnOptimizer):
        for name, parameter in _named_parameters(optimizer):
            keys = optimizer.state_of(parameter)
            optimizer.take(parameter, {key: tensors[f"optim.{name}.{key}"] for key in keys})


def _stored(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    return optimizer.stored(parameter) if isinstance(optimizer, OwnOptimizer) else materialized(optimizer, parameter)


def _named_parameters(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for group in optimizer.param_groups:
        yield from zip(group["names"], group["params"], strict=True)


def materialized(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """One parameter's state tensors, created as the first step would."""
    if isinstance(optimizer, OwnOptimizer):
        return optimizer.state_of(parameter)
    state = optimizer.state[parameter]
    if isinstance(optimizer, Adam) and not state:
        # A fused kernel counts steps on the parameter's device, the others on the host.
        device = parameter.device if optimizer.defaults["fused"] else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
        state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
    elif isinstance(optimizer, SGD) and optimizer.defaults["momentum"] and state.get("momentum_buffer") is None:
        # A first step takes the gradient itself; from zeros it computes 0 * momentum + gradient, the same bits.
        state["momentum_buffer"] = torch.zeros_like(parameter, dtype=torch.float32)
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}
