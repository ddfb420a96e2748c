"""Training step of train.py with a fixed batch in memory in place of the data loader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from nanogpt import Size
from torch import nn

from gptlite.config import Config
from gptlite.config.trainer import TrainerConfig
from gptlite.data.batches import BatchSchedule
from gptlite.data.loader import Batch, Loader
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.init import init_weights
from gptlite.models.model import Model
from gptlite.models.parallelize import build_passes
from gptlite.ops.config import OpsConfig
from gptlite.ops.select import Ops, select_ops
from gptlite.optimizer.config import AdamWConfig, OptimizerConfig
from gptlite.optimizer.schedule_config import ConstantConfig
from gptlite.optimizer.state import optimizer_state
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.precision import Precision, PrecisionConfig, resolve_precision
from gptlite.trainer.build import build_state
from gptlite.trainer.signals import Stopping, StopSignal
from gptlite.trainer.step import Step
from gptlite.trainer.steps import Steps, lag_of

# The presets of conf/model, with GPT-2's vocabulary. `tiny` is for tests of a script.
MODELS = {
    "small": GPTConfig("gpt3-small", num_layers=12, num_heads=12, d_model=768, sequence_length=2048),
    "medium": GPTConfig("gpt3-medium", num_layers=24, num_heads=16, d_model=1024, sequence_length=2048),
    "xl": GPTConfig("gpt3-xl", num_layers=24, num_heads=16, d_model=2048, sequence_length=2048),
    "tiny": GPTConfig("tiny", num_layers=2, num_heads=2, d_model=64, sequence_length=64),
}
BATCH = {"small": 16, "xl": 16, "tiny": 2}  # sequences of a step in bench_gpu.py


def model_of(size: str) -> GPTConfig:
    """Return the configuration of the model with a key of MODELS."""
    return replace(MODELS[size], vocab_size=501 if size == "tiny" else 50257)


def config_of(size: Size, **options: Any) -> GPTConfig:
    """Return the configuration of our GPT without biases, with the dimensions of `size`."""
    shape = {key: getattr(size, key) for key in ("vocab_size", "d_model", "num_heads", "num_layers", "sequence_length")}
    return GPTConfig(**shape, bias=False, **options)


def run_config(
    model: GPTConfig,
    precision: str = "bf16",
    layout: ParallelismConfig | None = None,
    rule: OptimizerConfig | None = None,
    compile: bool = False,
) -> Config:
    """Return the configuration of a run with a constant learning rate. The optimizer is AdamW unless `rule` is set.

    With `precision` bf16+head or fp8+head, the output head is in fp8.
    """
    dtype, _, head = precision.partition("+")
    return Config(
        seed=0,
        model=model,
        precision=PrecisionConfig(Precision[dtype], fp8_head=head == "head"),
        parallelism=layout or ParallelismConfig(),
        optimizer=rule or AdamWConfig(),
        schedule=ConstantConfig(),
        trainer=TrainerConfig(max_steps=1000, compile=compile),
    )


def build_step(
    config: Config,
    mesh: Mesh,
    micro_batch: int,
    micro_batches: int = 1,
    ops: Ops | None = None,
    execute: Callable[..., Any] | None = None,
) -> Callable[[], Any]:
    """Build a training step as pretrain.py does, for a configuration by `run_config`.

    Each step of a rank has `micro_batches` micro-batches of `micro_batch` sequences. `ops` defaults to a run's ops on
    this machine, and `execute` to a Step's. As in the training loop, on a GPU the result of a step is read after the
    next step is enqueued. On the meta device, weights are not initialized.
    """
    device, rule = mesh.device, config.optimizer
    ops = ops or select_ops(OpsConfig(), device)
    policy = resolve_precision(config.precision, device)
    model = Model.of(config.model, policy)
    loader = cast(Loader, SameBatch(config.model, mesh, micro_batch, micro_batches))

    def fill(parts: Sequence[nn.Module]) -> None:
        for part in parts if device.type != "meta" else ():
            init_weights(model, part, config.seed)

    state = build_state(config, mesh, policy, ops, model, fill, loader, {})
    optimizer_state(state.optimizer)  # creates the state, so that the first step is not slower
    passes = build_passes(
        model,
        state.runner,
        config.parallelism,
        micro_batches=micro_batches,
        micro_batch_size=micro_batch,
        sequence_length=config.model.sequence_length,
    )
    execution = () if execute is None else (execute,)
    step = Step(mesh, passes, rule.lr, rule.clip_norm, Stopping(mesh, StopSignal()), *execution)
    steps = Steps(step, lag_of(state.optimizer, device, 1 if device.type == "meta" else None))

    def take() -> Any:
        steps.begin(state)
        return steps.take() if steps.ready(False) else None

    return take


class SameBatch:
    """Replacement for a loader: one batch in host memory, page-locked for a GPU, and copied to the device each time."""

    def __init__(self, config: GPTConfig, mesh: Mesh, micro_batch: int, micro_batches: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (micro_batch, config.sequence_length + 1)
        rows = torch.randint(config.vocab_size or 1, shape, generator=generator, device="cpu")
        batch = Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), torch.arange(micro_batch, device="cpu"))
        self._batch = batch.pin_memory() if mesh.device.type == "cuda" else batch
        self._device = mesh.device
        self.schedule = BatchSchedule(micro_batch * micro_batches * mesh.data_size)
        self.num_micro_batches = micro_batches

    def micro_batches(self, consumed_samples: int) -> int:
        """Return the number of micro-batches, which is equal in every step."""
        return self.num_micro_batches

    def batch(self, consumed_samples: int, micro_index: int) -> Batch:
        """Return the batch on the device."""
        return self._batch.to(self._device)
