"""What ranks do in test_reshard.py: a state full of known values is saved by one layout and loaded by another."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from run_files import on_disk
from torch import Tensor

from distributed.cells.compare import same_bits
from distributed.cells.steps import joined
from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.config import Config
from gptlite.config.saved import to_yaml
from gptlite.optimizer.base import OwnOptimizer
from gptlite.parallelism.boxes import local_box, local_tensor
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.satellites.parity.gather import Whole, gather
from gptlite.satellites.parity.record import build
from gptlite.trainer.eval import evaluate
from gptlite.trainer.folder import RunFolder
from gptlite.trainer.state import TrainState

SAVED, OTHER = "saved", "other"  # what a state is filled with
STEP = 7
COUNTERS = {"step": STEP, "consumed_samples": 91, "tokens": 1092, "best_val_loss": 0.1 + 0.2, "evaluated_step": 5}


def drawn(key: str, shape: torch.Size, filling: str) -> Tensor:
    """The whole of a tensor, each element another: a function of its key and place alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{filling} {key}".encode()))
    if key.endswith(".step"):
        return torch.randint(1, 10**6, (), generator=generator).float()
    values = torch.randn(shape, generator=generator) * 0.3
    return values * values if key.endswith("exp_avg_sq") else values


def held(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that this rank trains with, by key: of a tied embedding both copies, if it has them."""
    state.tensors()  # makes the optimizer's
    for part in state.parts:
        for name, buffer in state.model.named_buffers(part):
            yield f"model.{name}", buffer
    for group in state.optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            yield f"model.{name}", parameter.detach()
            optimizer = state.optimizer
            own = optimizer.stored(parameter) if isinstance(optimizer, OwnOptimizer) else optimizer.state[parameter]
            for key, value in own.items():
                yield f"optim.{name}.{key}", value


def fill(state: TrainState, filling: str) -> None:
    """Gives every tensor the values drawn for it."""
    for key, tensor in held(state):
        sizes, starts = local_box(tensor)
        box = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        local_tensor(tensor).detach().copy_(drawn(key, tensor.shape, filling)[box])


def filled(config: Config, mesh: Mesh, filling: str) -> TrainState:
    """A run's state, built as training builds it, with those values."""
    state, _ = build(config, mesh)
    fill(state, filling)
    return state


def held_out_loss(state: TrainState) -> float:
    """What the model makes of some text: it tells where the values of a layer are in the wrong place."""
    found = evaluate(state.model, state.runner, state.loader.validation_batches(8), None)
    assert found is not None
    return found.loss


def yaml(config: Config, mesh: Mesh) -> str:
    """The configuration for a checkpoint, which rank 0 writes."""
    return to_yaml(config) if mesh.is_main else ""


def save(config: Config, world: int, name: str) -> Path | None:
    """On the source's ranks: a checkpoint of the values. Gives its folder."""
    with joined(world, name) as is_in:
        if not is_in:
            return None
        mesh = build_mesh(config.parallelism)
        state = filled(config, mesh, SAVED)
        for key, value in COUNTERS.items():
            setattr(state, key, value)
        words = mesh.layout.describe(config.parallelism)
        with closing(state.loader), closing(Checkpointer(config.checkpoint, Path(config.run.dir), mesh, words)) as into:
            estimated = into.size(state.tensors(), state.meta(), yaml(config, mesh), None)
            folder = into.save(state.tensors(), state.meta(), yaml(config, mesh), None, print)
            if mesh.is_main:
                assert on_disk(folder) <= estimated <= 1.1 * on_disk(folder), f"{estimated} for {on_disk(folder)}"
            return folder


@dataclass(frozen=True)
class Resumed:
    """What a rank has after loading: how far training is, the loss, where it saved again; `wrong`: see `differing`."""

    counters: dict[str, Any]
    loss: float
    folder: Path
    wrong: list[str]


def resume(config: Config, world: int, name: str) -> Resumed | None:
    """On the target's ranks: restores the checkpoint of checkpoint.resume as a run does, and saves it again."""
    with joined(world, name) as is_in:
        if not is_in:
            return None
        mesh = build_mesh(config.parallelism)
        state, run = filled(config, mesh, OTHER), RunFolder(config, mesh)
        with closing(state.loader), closing(run.checkpointer):
            run.restore(state)
            wholes = gather(held(state))
            loss, meta = held_out_loss(state), state.meta()
            folder = run.checkpointer.save(state.tensors(), meta, yaml(config, mesh), None, print)
            wrong = [] if wholes is None else differing(wholes, config.precision.master_weights)
            return Resumed({key: meta[key] for key in COUNTERS}, loss, folder, wrong)


def differing(wholes: dict[str, Whole], masters: bool) -> list[str]:
    """The keys of tensors that are not, bit for bit and in every copy, what was saved: of weights, what bf16 has of it
    where there are no fp32 masters."""
    wrong = []
    for key, whole in wholes.items():
        saved = drawn(key, whole.value.shape, SAVED)
        if key.startswith("model.") and not masters:
            saved = saved.bfloat16().float()
        wrong += [key] if not same_bits(whole.value, saved) or bool(whole.disagreements) else []
    return wrong
