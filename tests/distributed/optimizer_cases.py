"""What ranks do in test_optimizers.py: steps of an optimizer from known weights by known gradients."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor, nn

from distributed.reshard_cases import OTHER, SAVED, drawn, filled, held, joined
from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.config import Config, to_yaml
from gptlite.optimizer.rounded import set_step
from gptlite.optimizer.state import optimizer_state
from gptlite.parallelism.boxes import local_box, local_part
from gptlite.parallelism.mesh import build_mesh
from gptlite.parallelism.words import layout_words
from gptlite.parity.gather import Whole, gather
from gptlite.run_folder import RunFolder
from gptlite.trainer.state import TrainState

STEPS = 4


def distances(config: Config, world: int, name: str, reference: str, resume: bool = False) -> dict[str, float] | None:
    """On the first `world` ranks: how far every weight and state is from what is in a file, one process's for example,
    after some steps, or after resuming from checkpoint.resume.

    By key on rank 0, as a part of the largest value; infinite where there is no such key, or copies are not alike.
    """
    with joined(world, name) as is_in:
        found = (_resumed if resume else take_steps)(config) if is_in else None
    if found is None:
        return None
    expected: dict[str, Tensor] = torch.load(reference)
    return {key: _distance(found.get(key), expected.get(key)) for key in found | expected}


def _distance(found: Whole | None, expected: Tensor | None) -> float:
    if found is None or expected is None or found.disagreements:
        return math.inf
    apart = (found.value - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    return apart.item() if apart.isfinite() else math.inf


def saved_after_steps(config: Config, world: int, name: str, reference: str) -> str | None:
    """On the first `world` ranks: steps, then a checkpoint, whose folder is given; what is in it also in a file."""
    with joined(world, name) as is_in:
        found = take_steps(config, save=True) if is_in else None
    if found is not None:
        torch.save({key: whole.value for key, whole in found.items()}, reference)
    return str(Path(config.run.dir) / "checkpoints" / f"step-{STEPS:08d}") if found is not None else None


def _resumed(config: Config) -> dict[str, Whole] | None:
    mesh = build_mesh(config.parallelism)
    state, run = filled(config, mesh, OTHER), RunFolder(config, mesh)
    with closing(state.loader), closing(run.checkpointer):
        run.restore(state)
        found = gather(held(state))
    mesh.close()
    return found


def take_steps(config: Config, save: bool = False) -> dict[str, Whole] | None:
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
        if save:
            state.step = STEPS
            words = layout_words(config.parallelism, mesh.layout)
            with closing(Checkpointer(config.checkpoint, Path(config.run.dir), mesh, words)) as into:
                into.save(state.tensors(), state.meta(), to_yaml(config), None, print)
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
