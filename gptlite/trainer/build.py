"""Construction of a run from its configuration, for training, parity checks and the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from gptlite.config.completed import refuse_larger_vocabulary, with_epochs, with_vocabulary
from gptlite.config.plugins import import_included
from gptlite.config.schema import Config
from gptlite.config.trainer import NOISES
from gptlite.data.batch_loader import BatchLoader
from gptlite.data.build import build_loader, open_data
from gptlite.data.opened import OpenedData
from gptlite.errors import ConfigError
from gptlite.models.init import init_weights
from gptlite.models.model import Model
from gptlite.models.parallelize import build_passes, copy_weights, materialize
from gptlite.ops.select import Ops
from gptlite.optimizer.fused import writes_copies
from gptlite.optimizer.schedule import Schedule
from gptlite.parallelism.config import REDUCTIONS, Offload
from gptlite.parallelism.in_files import offload_state, place_parameters
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.pipeline import OnePart, Pipeline
from gptlite.parallelism.stage_runner import StageRunner
from gptlite.parallelism.zero import storage_device
from gptlite.precision import Policy, resolve_precision
from gptlite.progress import Log
from gptlite.trainer.loss_scale import build_scaler
from gptlite.trainer.parts import agreed_ops, build_parts, build_updates
from gptlite.trainer.spike import build_spike_watch
from gptlite.trainer.state import TrainState


@dataclass(frozen=True)
class Run:
    """Objects needed for training. `config` has the vocabulary size and the number of steps filled in."""

    config: Config
    mesh: Mesh
    policy: Policy
    ops: Ops
    data: OpenedData
    state: TrainState
    passes: OnePart | Pipeline


def build_run(config: Config, mesh: Mesh, log: Log) -> Run:
    """Build all objects of a run, with initial weights.

    Collective. Raises ConfigError, on all ranks, for a configuration that cannot run here.
    """
    import_included()  # registers the kinds of data, if another process has composed the configuration
    mesh = with_reduction(config, mesh)
    policy = resolve_precision(config.precision, mesh.device)
    ops = agreed_ops(config.ops, mesh, documents=config.data.documents)
    data = open_data(config.data, config.seed, log, mesh)
    if data.tokenizer is not None:
        refuse_larger_vocabulary(config, data.tokenizer.vocab_size)
        config = with_vocabulary(config, data.tokenizer.vocab_size)
    config = with_epochs(config, data.num_samples(config.data.sequence_length))

    model = Model.of(config.model, policy)
    loader = build_loader(config.data, data, mesh, config.seed, config.parallelism)
    example = None
    if sample := data.example():
        model.check_pass(*sample)
        example = single_input(sample[0], config.parallelism.pipeline)

    def fill(parts: Sequence[nn.Module]) -> None:
        for part in parts:
            init_weights(model, part, config.seed)
            model.fill_buffers(part, ops, config.seed)

    state = build_state(config, mesh, policy, ops, model, fill, loader, data.identity)
    passes = build_passes(
        model,
        state.runner,
        config.parallelism,
        micro_batches=loader.num_micro_batches,
        micro_batch_size=loader.micro_batch_size,
        sequence_length=config.data.sequence_length,
        example=example,
    )
    return Run(config, mesh, policy, ops, data, state, passes)


def with_reduction(config: Config, mesh: Mesh) -> Mesh:
    """Return the mesh with what replaces FSDP2's sums of gradients, if the configuration asks for something."""
    built = [import_module(name).build_reduction(config, mesh) for name, asked in REDUCTIONS if asked(config)]
    return replace(mesh, reduction=next(filter(None, reversed(built)), None))


def build_state(
    config: Config,
    mesh: Mesh,
    policy: Policy,
    ops: Ops,
    model: Model,
    fill: Callable[[Sequence[nn.Module]], None],
    loader: BatchLoader,
    identity: dict[str, Any],
) -> TrainState:
    """Build the state of a new run: the model's parts on this rank, the optimizer, the schedule and the loader.

    `fill` sets the weights and buffers of the parts. `identity` identifies the data, which must be the same when the
    run resumes. Collective.
    """
    layout, compiles = config.parallelism, config.trainer.compile
    parts = build_parts(model, layout, mesh, policy, ops, config.seed, compile=compiles)
    placed = place_parameters(parts, layout, mesh)
    materialize(model, parts, storage_device(mesh, layout))
    fill(parts)
    schedule = Schedule(config.schedule, config.trainer.max_steps)
    completed = config.optimizer.completed(config.trainer.max_steps, schedule.warmup_steps)
    updates = build_updates(completed, model, parts, policy, ops, config.seed)
    optimizer = offload_state(updates, layout, mesh, placed)
    copies = writes_copies(optimizer) and not compiles
    if ops.weight_copies and copies:
        copy_weights(parts, mesh, policy)
    repeats = loader.num_micro_batches > 1 or layout.activation_checkpointing.recomputes
    if copies and policy.fp8_weights and repeats and mesh.world_size == 1 and layout.offload is Offload.none:
        from gptlite.ops.fp8 import keep_operands

        keep_operands(parts)
    state = TrainState(
        model,
        StageRunner(parts, mesh, layout),
        optimizer,
        schedule,
        loader,
        identity,
        scaler=build_scaler(config.precision, policy),
        spikes=build_spike_watch(config.trainer.spike),
    )
    noises = (import_module(name).build_noise(config, mesh, state) for name, asked in NOISES if asked(config))
    state.noise = next(filter(None, noises), None)
    if mesh.reduction is not None:
        mesh.reduction.bind(state.named_parameters(), optimizer)
    return state


def single_input(x: Any, stages: int) -> Tensor | None:
    """Return the first input of a batch `x`, without the batch dim; None if it is not a tensor.

    Raises ConfigError if it is not a tensor and there are several pipeline `stages`.
    """
    if isinstance(x, Tensor):
        return x[0]
    if stages > 1:
        raise ConfigError(
            f"parallelism.pipeline={stages}: the input of a sample is {type(x).__name__}; a pipeline needs one tensor"
        )
    return None
