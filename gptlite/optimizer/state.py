"""Optimizer state as flat tensors with global names, as a checkpoint stores it.

A key is `optim.<parameter name>.<state name>`, e.g. `optim.layers.0.attn.qkv.weight.exp_avg`. torch's `state_dict`
numbers the parameters; these keys do not depend on the order or the grouping of parameters.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from gptlite.optimizer.base import OwnOptimizer, rule_of
from gptlite.parallelism.in_files import settle


def optimizer_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return `{key: live state tensor}`. Writing into the tensors changes the optimizer.

    8-bit state is returned as fp32 copies, which `take_optimizer_state` copies back. State that torch would create at
    the first step is created here if missing, with its initial value, so that a checkpoint can be read into a new
    optimizer in place. Moments have the parameter's shape, and Adafactor's factors one element per row or column;
    `step` is an fp32 scalar. State in files is memory-mapped.
    """
    settle(optimizer)
    tensors: dict[str, Tensor] = {}
    for name, parameter in _named_parameters(optimizer):
        for key, value in _stored(optimizer, parameter).items():
            tensors.setdefault(f"optim.{name}.{key}", value)  # if a parameter has two copies, keep the first
    return tensors


def take_optimizer_state(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Write values back into the optimizer where `optimizer_state` returned copies, after changes to `tensors`."""
    rule = rule_of(optimizer)
    if isinstance(rule, OwnOptimizer):
        for name, parameter in _named_parameters(optimizer):
            keys = rule.state_of(parameter)
            rule.take(parameter, {key: tensors[f"optim.{name}.{key}"] for key in keys})


def _stored(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    rule = rule_of(optimizer)
    return rule.stored(parameter) if isinstance(rule, OwnOptimizer) else materialized(rule, parameter)


def _named_parameters(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for group in optimizer.param_groups:
        yield from zip(group["names"], group["params"], strict=True)


def materialized(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return one parameter's state tensors. Creates them as the first step would."""
    rule = rule_of(optimizer)
    if isinstance(rule, OwnOptimizer):
        return rule.state_of(parameter)
    state = rule.state[parameter]
    if isinstance(rule, Adam) and not state:
        # A fused kernel counts steps on the parameter's device, the others on the host.
        device = parameter.device if rule.defaults["fused"] else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
        state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
    elif isinstance(rule, SGD) and rule.defaults["momentum"] and state.get("momentum_buffer") is None:
        # torch's first step sets the buffer to the gradient. From zeros it computes 0 * momentum + gradient: same bits.
        state["momentum_buffer"] = torch.zeros_like(parameter, dtype=torch.float32)
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}
