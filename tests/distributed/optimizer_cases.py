"""What ranks do in test_optimizers.py: steps of an optimizer from known weights by known gradients."""

from __future__ import annotations

import math
from contextlib import closing

import torch
from torch import Tensor, nn

from distributed.reshard_cases import SAVED, drawn, filled, held, joined
from gptlite.config import Config
from gptlite.optimizer.rounded import set_step
from gptlite.optimizer.state import optimizer_state
from gptlite.parallelism.boxes import local_box, local_part
from gptlite.parallelism.mesh import build_mesh
from gptlite.parity.gather import Whole, gather
from gptlite.trainer.state import TrainState

STEPS = 4


def distances(config: Config, world: int, name: str, reference: str) -> dict[str, float] | None:
    """On the first `world` ranks: how far every weight and state is after some steps from one process's in a file.

    By key on rank 0, as a part of the largest value; infinite where there is no such key, or copies are not alike.
    """
    with joined(world, name) as is_in:
        found = take_steps(config) if is_in else None
    if found is None:
        return None
    expected: dict[str, Tensor] = torch.load(reference)
    return {key: _distance(found.get(key), expected.get(key)) for key in found | expected}


def _distance(found: Whole | None, expected: Tensor | None) -> float:
    if found is None or expected is None or found.disagreements:
        return math.inf
    apart = (found.value - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    return apart.item() if apart.isfinite() else math.inf


def take_steps(config: Config) -> dict[str, Whole] | None:
    """Every weight and state after the steps, whole on rank 0, in the group that has been joined, or alone."""
    mesh = build_mesh(config.parallelism)
    state = filled(config, mesh, SAVED)
    with closing(state.loader):
        for value in optimizer_state(state.optimizer).values():
            local_part(value).zero_()
        state.refresh_copies()
        for step in range(STEPS):
            _give_gradients(state, step)
            set_step(state.optimizer, step)
            state.optimizer.step()
        found = gather(held(state))
    mesh.close()
    return found


def _give_gradients(state: TrainState, step: int) -> None:
    """To every parameter the same as in every other layout: some rows nothing, and sizes that differ by the tensor."""
    for group in state.optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            parameter.grad = _gradient(name, parameter, step)


def _gradient(name: str, parameter: nn.Parameter, step: int) -> Tensor:
    whole = drawn(name, parameter.shape, f"gradient {step}") * 10.0 ** -(len(name) % 5)
    if parameter.ndim > 1:
        whole[2::7] = 0.0
    sizes, starts = local_box(parameter)
    box = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    gradient = torch.zeros_like(parameter, dtype=torch.float32)
    local_part(gradient).copy_(whole[box])
    return gradient
