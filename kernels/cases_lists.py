"""Test cases of ops on lists of tensors: the norm of gradients, and AdamW."""

from typing import Any

import torch
from torch import Tensor

from gptlite.kernels.case import Case, Inputs, Tensors, size_of
from gptlite.torch_private.benchmarks import fused_adamw_

OPS = torch.ops.gptlite
ADAM = (1e-3, 0.9, 0.95, 1e-8, 0.1)  # lr, beta1, beta2, eps, weight_decay
# Sizes for CPUs, then for GPUs. The latter exceed the cache.
LISTS = ((1024, 768), (2048, 2048)), ((2048, 2048), (16384, 8192))


def _list_inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    shapes = [(rows, width), (width,), (1,), (7, rows)]
    gradients = [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]
    state = {name: [torch.rand(shape, device=device) for shape in shapes] for name in ("parameters", "m", "v")}
    return {"gradients": gradients, **state, "steps": [torch.tensor(3.0, device=device) for _ in shapes]}


def _lists(inputs: Inputs) -> list[list[Tensor]]:
    return [inputs[name] for name in ("parameters", "gradients", "m", "v", "steps")]


def _adamw(inputs: Inputs) -> Tensors:
    OPS.adamw_(*_lists(inputs), *ADAM, False, None, None)
    parameters, _, *state = _lists(inputs)
    return tuple(tensor for each in (parameters, *state) for tensor in each)


def _torch_adamw(inputs: Inputs) -> Tensors:
    lr, beta1, beta2, eps, decay = ADAM
    new: list[tuple[Tensor, ...]] = []
    for p, g, m, v, step in zip(*_lists(inputs), strict=True):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        update = m / (1 - beta1 ** (step + 1)) / ((v / (1 - beta2 ** (step + 1))).sqrt() + eps)
        new.append((p - lr * (decay * p + update), m, v, step + 1))
    return tuple(tensor for each in zip(*new, strict=True) for tensor in each)


def _plain_adamw(inputs: Inputs) -> Tensors:
    lr, beta1, beta2, eps, decay = ADAM
    parameters, gradients, m, v, steps = _lists(inputs)
    settings: dict[str, Any] = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": decay}
    fp32 = [gradient.float() for gradient in gradients]
    fused_adamw_(parameters, fp32, m, v, [], steps, amsgrad=False, maximize=False, **settings)
    return ()


def _adamw_traffic(inputs: Inputs) -> tuple[float, ...]:
    """Bytes of an update: parameters and both moments are read and written, gradients are read."""
    parameters, gradients, m, v, _ = _lists(inputs)
    return (size_of(gradients) + 2 * size_of([parameters, m, v]),)


UPDATES = (
    Case(
        ("norm",),
        _list_inputs,
        lambda given: (OPS.norm(given["gradients"]),),
        None,
        lambda given: (torch.nn.utils.get_total_norm(given["gradients"]),),
        (),
        *LISTS,
        traffic=lambda given: (size_of(given["gradients"]),),
    ),
    Case(
        ("adamw_",),
        _list_inputs,
        _adamw,
        None,
        _torch_adamw,
        (),
        *LISTS,
        traffic=_adamw_traffic,
        plain=_plain_adamw,
        compared=None,
    ),
)
