"""The trainer's own step, with tokens that are drawn once and stay in memory: what train.py runs, without its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from gptlite.data.batches import BatchSchedule
from gptlite.data.loader import Batch, Loader
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.init import init_weights
from gptlite.models.model import Model
from gptlite.models.parallelize import build_passes, copy_weights, materialize
from gptlite.ops.select import Ops
from gptlite.optimizer.config import AdamWConfig, ConstantConfig
from gptlite.optimizer.schedule import Schedule
from gptlite.optimizer.state import optimizer_state
from gptlite.parallelism.chain import Chain
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.precision import Policy
from gptlite.trainer.build import build_parts, build_updates
from gptlite.trainer.signals import Stopping, StopSignal
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Step
from gptlite.trainer.steps import Steps, lag_of

# As conf/model has them; one vocabulary, GPT-2's. `tiny` is for trying the script.
MODELS = {
    "small": GPTConfig("gpt3-small", num_layers=12, num_heads=12, d_model=768, sequence_length=2048),
    "xl": GPTConfig("gpt3-xl", num_layers=24, num_heads=16, d_model=2048, sequence_length=2048),
    "tiny": GPTConfig("tiny", num_layers=2, num_heads=2, d_model=64, sequence_length=64),
}
VOCABULARY = {"small": 50257, "xl": 50257, "tiny": 501}


@dataclass(frozen=True)
class Taken:
    """A step that can be taken again and again."""

    step: Callable[[], Any]
    state: TrainState
    config: GPTConfig
    tokens: int  # of a step


def model_of(size: str) -> GPTConfig:
    """The configuration of a model by its short name."""
    return replace(MODELS[size], vocab_size=VOCABULARY[size])


def build_step(
    config: GPTConfig,
    ops: Ops,
    policy: Policy,
    device: torch.device,
    micro_batch: int,
    *,
    compile: bool = False,
    drawn: bool = True,
) -> Taken:
    """One device, one micro-batch of `micro_batch` whole sequences a step, AdamW, clipping at 1.

    Built as pretrain.py builds it. `drawn`: with initial weights; a meta device has none.
    """
    mesh, layout = Mesh(device), ParallelismConfig()
    model = Model.of(config, policy)
    parts = build_parts(model, layout, mesh, policy, ops, compile=compile)
    materialize(model, parts, device)
    for part in parts if drawn else ():
        init_weights(model, part, seed=0)
    optimizer = build_updates(AdamWConfig(), model, parts, layout, mesh, policy, ops)
    optimizer_state(optimizer)  # creates it: the first step is like the others
    if ops.weight_copies and not compile:
        copy_weights(parts, mesh, policy)
    loader = SameBatch(config, micro_batch, device)
    chain = Chain(parts, mesh, layout)
    state = TrainState(model, chain, optimizer, Schedule(ConstantConfig(), 1000), cast(Loader, loader), {})
    passes = build_passes(
        model, chain, layout, micro_batches=1, micro_batch_size=micro_batch, sequence_length=config.sequence_length
    )
    step = Step(mesh, passes, AdamWConfig().lr, AdamWConfig().clip_norm, Stopping(mesh, StopSignal()))
    return Taken(_taking(step, state, device), state, config, micro_batch * config.sequence_length)


def _taking(step: Step, state: TrainState, device: torch.device) -> Callable[[], Any]:
    """Steps as the training loop takes them: on a GPU the result of one is read when the next has been enqueued."""
    steps = Steps(step, lag_of(state.optimizer, device, 1 if device.type == "meta" else None))

    def take() -> Any:
        steps.begin(state)
        return steps.take() if steps.ready(False) else None

    return take


class SameBatch:
    """As much of a loader as a step asks for: one batch in host memory, page-locked for a GPU, copied at each step."""

    num_micro_batches = 1

    def __init__(self, config: GPTConfig, micro_batch: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (micro_batch, config.sequence_length + 1)
        rows = torch.randint(config.vocab_size or 1, shape, generator=generator, device="cpu")
        batch = Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), torch.arange(micro_batch, device="cpu"))
        self._batch = batch.pin_memory() if device.type == "cuda" else batch
        self._device = device
        self.schedule = BatchSchedule(micro_batch)

    def micro_batches(self, consumed_samples: int) -> int:
        """One in every step."""
        return 1

    def batch(self, consumed_samples: int, micro_index: int) -> Batch:
        """The batch on the device."""
        return self._batch.to(self._device)
