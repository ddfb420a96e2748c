"""What a rank takes of memory in a step, on real ranks or on one process that believes in the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from distributed.cells.steps import built, planned_work
from gptlite.config import Config, load
from gptlite.models.parallelize import finish_gradients
from gptlite.ops.select import select_ops
from gptlite.parallelism import pipeline
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.pipeline import MicroBatches
from gptlite.parallelism.zero import before_backward
from gptlite.precision import Precision, PrecisionConfig
from gptlite.satellites.monitor.memory_watch import MemoryWatch, StepBytes
from gptlite.satellites.monitor.model_state import StateBytes
from gptlite.satellites.plan.memory import estimate
from gptlite.trainer import build as run_build
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Step

# Many equal blocks, little else, and hardly any activations. Every dimension divides by 16.
LAYERS, WIDTH = 12, 64
BLOCK = 12 * WIDTH**2 + 13 * WIDTH  # parameters
BASE = f"""
data=synthetic data.vocab_size=64 data.num_tokens=5000 data.micro_batch_size=1
model=gpt-lite
model.num_layers={LAYERS} model.num_heads=4 model.d_model={WIDTH} model.sequence_length=16 data.sequence_length=2
model.vocab_multiple=1
schedule=constant schedule.warmup_steps=0 run.dir=unused run.name=memory
""".split()


@dataclass(frozen=True)
class Case:
    """A layout, and the rank of it that is looked at."""

    data: int
    pipeline: int
    zero: int
    precision: str
    rank: int = 0
    schedule: str = "1f1b"
    accumulation: int = 2
    replicate: int = 1

    @property
    def world(self) -> int:
        return self.data * self.pipeline

    def config(self) -> Config:
        """Of its run."""
        base = _base()
        parallelism = ParallelismConfig(
            pipeline=self.pipeline, zero=self.zero, schedule=self.schedule, dp_replicate=self.replicate
        )
        data = replace(base.data, global_batch_size=self.data * self.accumulation)
        precision = PrecisionConfig(Precision(self.precision))
        return replace(base, parallelism=parallelism, data=data, precision=precision)


@cache
def _base() -> Config:
    return load(BASE)


@dataclass(frozen=True)
class Measured:
    """What was found and predicted on a rank whose parts have so many parameters before ZeRO cuts them."""

    found: StepBytes
    predicted: StateBytes
    parameters: int

    @property
    def a_parameter(self) -> float:
        """Bytes of model state."""
        return self.found.state.total / self.parameters

    @property
    def blocks(self) -> float:
        """All else, in fp32 blocks."""
        return self.found.activations / (4 * BLOCK)


def measure(case: Case, real: bool = True) -> Measured:
    """On this rank of the ranks there are, or of those imagined."""
    with built(case.config()) as (mesh, state, step):
        state.num_bytes()  # creates the optimizer's state
        plan = estimate(planned_work(case.config(), mesh, state), mesh.coordinate("pp"))
        predicted = StateBytes(plan.parameters, plan.gradients, plan.optimizer)
        parameters = sum(parameter.numel() for part in state.parts for parameter in part.parameters())
        with MemoryWatch(state.parts, state.optimizer, mesh.device, state.loader.num_micro_batches) as watch:
            if real:
                step(state)
            else:
                run_passes(state, step)
                watch.sample()  # what the optimizer's step would find; its first one takes a second on DTensors
    return Measured(watch.found(), predicted, parameters)


def run_passes(state: TrainState, step: Step) -> None:
    """The step up to its update, without a look at numbers that other ranks would have made."""
    batches = [state.loader.batch(0, index) for index in range(state.loader.num_micro_batches)]
    fields = ([getattr(batch, name) for batch in batches] for name in ("tokens", "targets", "sample_ids"))
    step.passes.run(MicroBatches(*fields), torch.tensor(1))
    finish_gradients(state.model, state.parts, step.mesh)


def imagine(cases: list[Case], planted: bool = False) -> list[Measured]:
    """One rank of each case, all others imagined: torch's fake process group moves nothing.

    `planted`: the pipeline holds gradients back until the last micro-batch, as torch's own stage does.
    """
    found = []
    for case in cases:
        with (
            imagined_world(case.rank, case.world),
            mock.patch.object(pipeline, "before_backward", hold_back if planted else before_backward),
            # There is nobody to agree with.
            mock.patch.object(run_build, "agreed_ops", lambda config, mesh, documents: select_ops(config, mesh.device)),
        ):
            found.append(measure(case, real=False))
    return found


@contextmanager
def imagined_world(rank: int, world: int) -> Iterator[None]:
    """A process group of which only this rank is real."""
    if world == 1:
        yield
        return
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        # Stages ask one another whether all know the shapes that they exchange: 1 is yes.
        with mock.patch.object(dist, "recv", lambda tensor, *args, **options: tensor.fill_(1)):
            yield
    finally:
        dist.destroy_process_group()


def hold_back(part: torch.nn.Module, zero: int, last: bool) -> None:
    """As `before_backward`, but never reduces before the last."""
    before_backward(part, min(zero, 1), last)
