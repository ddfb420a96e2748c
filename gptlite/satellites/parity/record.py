"""Recording of a run's first steps on any layout. Rank 0 collects all gradients and updated values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gptlite.config.schema import Config
from gptlite.parallelism.collectives import gather_objects
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.satellites.parity.gather import Whole, gather
from gptlite.trainer.build import build_run
from gptlite.trainer.signals import Stopping, StopSignal
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Step


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step: its loss and gradient norm, all gradients (reduced, not clipped), and all parameter values
    and buffers after the step.

    Tensors are whole and keyed by global name, in the order of the model. `reports` has every rank's (loss, gradient
    norm, learning rate).
    """

    step: int  # from 1
    loss: float  # nats per token
    grad_norm: float
    lr: float
    gradients: dict[str, Whole]
    values: dict[str, Whole]
    reports: list[tuple[float, float, float]] = field(default_factory=list)
    buffers: dict[str, Whole] = field(default_factory=dict)


def recorded(
    config: Config, steps: int, mesh: Mesh | None = None, restore: Callable[[TrainState], None] = lambda _: None
) -> Iterator[StepRecord | None]:
    """Yield the first steps of a run one by one, or None on ranks other than 0. Without a mesh, there is one process.

    The run is built and stepped as in `pretrain`, but writes no files. `restore` is called with its state before the
    first step, for example to load a checkpoint. Raises ConfigError and Diverged as `pretrain`
    does. Collective: every rank must iterate through all steps.
    """
    mesh = build_mesh(ParallelismConfig()) if mesh is None else mesh
    state, take_step = build(config, mesh)
    restore(state)
    gradients: dict[str, Whole] | None = None

    def inspect(state: TrainState) -> None:
        nonlocal gradients
        gradients = gather(_gradients(state))

    with closing(state.loader):
        for _ in range(steps):
            result = take_step(state, inspect)
            values = gather(state.named_parameters())
            buffers = gather(named for part in state.parts for named in part.named_buffers())
            reports = gather_objects(mesh, (result.loss, result.grad_norm, result.lr))
            if gradients is None or values is None or buffers is None:
                yield None
            else:
                numbers = state.step, result.loss, result.grad_norm, result.lr
                yield StepRecord(*numbers, gradients, values, reports, buffers)


def build(config: Config, mesh: Mesh) -> tuple[TrainState, Step]:
    """Return a run's state before its first step, and the step function."""
    run = build_run(config, mesh, lambda _: None)
    stopping, optimizing = Stopping(mesh, StopSignal()), config.optimizer
    return run.state, Step(run.mesh, run.passes, optimizing.lr, optimizing.clip_norm, stopping)


def _gradients(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters' gradients, divided by the loss scale. For a parameter without a gradient, yield zeros."""
    scale = state.scaler.scale if state.scaler else 1.0
    for name, p in state.named_parameters():
        yield name, torch.zeros_like(p) if p.grad is None else p.grad if scale == 1.0 else p.grad / scale
