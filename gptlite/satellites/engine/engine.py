"""`initialize` and `Engine`: training steps, evaluation and checkpoints for a program with its own training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.find import candidates, first_intact
from gptlite.checkpoint.load import verify_together
from gptlite.checkpoint.manifest import read_manifest
from gptlite.checkpoint.store import step_folders
from gptlite.config.batch import check_world
from gptlite.config.checks import check_device
from gptlite.config.saved import from_yaml, to_yaml
from gptlite.config.schema import Config
from gptlite.errors import ConfigError
from gptlite.launch.process import environment_restored
from gptlite.launch.starter import starter
from gptlite.models.model import Model
from gptlite.models.parallelize import build_passes
from gptlite.models.plain import call
from gptlite.parallelism.collectives import broadcast_text
from gptlite.parallelism.layout import check_micro_batches
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.parallelism.pipeline import OnePart, Pipeline
from gptlite.parallelism.process_group import join, leave_group
from gptlite.parallelism.rank_sync import from_main
from gptlite.precision import resolve_precision
from gptlite.satellites.engine.batches import HandedOver, agreed_samples, in_step, micro_batches
from gptlite.satellites.engine.module import ModuleSpec
from gptlite.satellites.engine.settings import compose
from gptlite.satellites.engine.weights import check_module, fill_from, on_meta, refuse_ties
from gptlite.satellites.samples.batch import SampleBatch
from gptlite.torch_private.ops import tree_map_only
from gptlite.trainer.build import build_state, single_input, with_reduction
from gptlite.trainer.eval import Evaluation, evaluate
from gptlite.trainer.parts import agreed_ops
from gptlite.trainer.signals import Stopping, StopSignal
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Step, StepResult

# Identity of the data in a checkpoint. The caller determines the order of the data.
IDENTITY = {"corpus": "batches", "tokenizer": "none", "sequence_length": "1"}


def initialize(
    model: nn.Module,
    optimizer: str = "adamw",
    config: Iterable[str] = (),
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
) -> Engine:
    """Prepare a module for training on the ranks of this program, and return its engine.

    Every rank calls this. Under torchrun or srun, the process joins the process group, unless it has already done so;
    without a launcher, this process is the only rank. Training starts from the values of rank 0's module; other ranks
    may build the module on the meta device. The given module is not changed: the module that is trained is the copy
    `Engine.module`.

    Args:
        model: module whose output is the first argument of `loss`. Children of an nn.Sequential, or the elements of
            nn.ModuleLists, are the units of ZeRO, activation checkpointing and pipeline stages.
        optimizer: name of a preset.
        config: overrides as on the command line, of `parallelism`, `precision`, `optimizer`, `schedule`, `ops`,
            `checkpoint` and a few other keys. By default the learning rate is constant.
        loss: function (output, target) that returns the mean over the targets. By default it is the cross entropy of
            logits [B, ..., classes], where targets of -100 are ignored.

    Raises:
        ConfigError: if an argument is invalid, or if the configuration cannot run on these ranks.
    """
    settings = compose(model, optimizer, config)
    outer = starter()
    # gloo's interface is chosen by an environment variable, which is needed only while groups are created.
    with environment_restored(), ExitStack() as held:
        if outer is not None and outer.world_size > 1 and not dist.is_initialized():
            os.environ.update(outer.environment())
            join(settings.parallelism.timeout_seconds)
            held.callback(leave_group)
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world > 1:
            # All ranks use rank 0's configuration, since the run folder's name contains the time.
            settings = from_yaml(broadcast_text(to_yaml(settings)))
        check_world(settings, world)
        check_device(settings, "cuda" if torch.cuda.is_available() else "cpu")
        mesh = build_mesh(settings.parallelism)
        held.callback(mesh.close)
        mesh = with_reduction(settings, mesh)
        state = _new_state(model, loss, settings, mesh)
        layout = mesh.layout.describe(settings.parallelism)
        checkpointer = Checkpointer(settings.checkpoint, Path(settings.run.dir).expanduser(), mesh, layout)
        return Engine(settings, mesh, state, checkpointer, held.pop_all())


def _new_state(module: nn.Module, loss: Callable[[Any, Any], Any] | None, config: Config, mesh: Mesh) -> TrainState:
    check_module(module, mesh)
    policy = resolve_precision(config.precision, mesh.device)
    spec = ModuleSpec(on_meta(module), loss)
    refuse_ties(spec, config.model, config.parallelism, mesh)
    model = replace(Model.of(config.model, policy), spec=spec)
    fill = partial(fill_from, module, model, mesh=mesh)
    loader = HandedOver(config.seed, mesh.device)
    return build_state(config, mesh, policy, agreed_ops(config.ops, mesh), model, fill, loader, dict(IDENTITY))


class Loaded(NamedTuple):
    """Step of a loaded checkpoint, and the `extra` that was saved with it."""

    step: int
    extra: dict[str, Any]


class Engine:
    """Trains one module step by step; `gptlite.initialize` returns it. All ranks must call its methods together.

    `config` is the complete configuration. Used as a context manager, an engine closes itself on exit.
    """

    def __init__(
        self, config: Config, mesh: Mesh, state: TrainState, checkpointer: Checkpointer, held: ExitStack
    ) -> None:
        self.config = config
        self._mesh, self._state, self._checkpointer, self._held = mesh, state, checkpointer, held
        self._log = print if mesh.is_main else lambda _: None
        self._own: set[Path] = set()  # checkpoints that this engine has saved or loaded
        self._stopping = Stopping(mesh, StopSignal())  # no signal handler is installed, so it never requests a stop
        self._passes: OnePart | Pipeline | None = None
        self._shape: torch.Size | None = None  # input shape of the micro-batches for which the pipeline was built

    @property
    def module(self) -> nn.Module:
        """The trained module, or this rank's first part of it in a pipeline. With ZeRO its parameters are sharded."""
        return self._state.parts[0]

    @property
    def step_number(self) -> int:
        """Number of steps taken."""
        return self._state.step

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.config.optimizer.lr * self._state.schedule.factor(self._state.schedule_step)

    @property
    def data_rank(self) -> int:
        """Index of this rank's share of a global batch: `rank` of torch's DistributedSampler."""
        return self._mesh.data_rank

    @property
    def data_size(self) -> int:
        """Number of shares of a global batch: `num_replicas` of torch's DistributedSampler."""
        return self._mesh.data_size

    def step(self, batch: Any) -> StepResult:
        """Take one optimizer step, and return its loss, gradient norm and learning rate.

        `batch` is this rank's share of the global batch: (input, target), (argument, ..., target), or a dict with the
        key `labels` or `target`, on any device. Gradients are accumulated over a list of batches, and over the
        parts of a batch with more samples than data.micro_batch_size. The loss is the mean over the targets of all
        ranks. Ranks with the same `data_rank`, such as the ranks of a pipeline, must pass the same batch.

        Raises ConfigError for a batch without a target. If the loss is not finite, raises RuntimeError without changing
        the parameters.
        """
        batches = micro_batches(batch, self.config.data.micro_batch_size)
        samples = agreed_samples(batches, self._mesh)
        loader = self._state.loader
        assert isinstance(loader, HandedOver)
        loader.take(batches, samples)
        optimizer = self.config.optimizer
        take = Step(self._mesh, self._passes_for(batches), optimizer.lr, optimizer.clip_norm, self._stopping)
        return take(self._state)

    def evaluate(self, batches: Iterable[Any]) -> Evaluation:
        """Evaluate batches on all ranks. In the result, `loss` is the mean loss, and `means` maps metrics to their
        means.

        Batches are as in `step`, but ranks may have different numbers of them. With the default loss, the metric
        `accuracy` is computed. Raises ConfigError if there are no targets.
        """
        size = self.config.data.micro_batch_size
        each = in_step((part for batch in batches for part in micro_batches(batch, size)), self._mesh)
        found = evaluate(self._state.model, self._state.runner, each, None)
        if found is None or not found.tokens:
            raise ConfigError("batches: nothing to evaluate; give at least one batch with a target")
        return found

    def __call__(self, x: Any) -> Any:
        """Return the module's output for the input of a batch, in evaluation mode and without gradients.

        Raises ConfigError in a pipeline, where no rank holds the whole module.
        """
        if (stages := self.config.parallelism.pipeline) > 1:
            raise ConfigError(
                f"parallelism.pipeline={stages}: no rank holds the whole module, so it cannot be called; "
                "use parallelism.pipeline=1"
            )
        device, dtype = self._mesh.device, self._state.model.autocast
        x = tree_map_only(torch.Tensor, lambda leaf: leaf.to(device), x)
        with self._state.runner.reading(), torch.autocast(device.type, dtype, enabled=dtype is not None):
            return call(self.module, x)

    def save(self, folder: str | Path | None = None, extra: Mapping[str, Any] | None = None) -> Path:
        """Save a checkpoint below `folder`, by default run.dir, and return its path.

        `extra` is returned by `load`, and must be serializable as JSON. Older checkpoints beyond checkpoint.keep are
        removed. Raises ConfigError if this engine has neither saved nor loaded the newest checkpoint in the folder.
        Raises OSError if the disk is full; existing checkpoints are then unchanged.
        """
        checkpointer, state = self._checkpointer, self._state
        checkpointer.finish()  # a save in progress still uses the previous folder
        checkpointer.root = Path(folder or self.config.run.dir).expanduser() / "checkpoints"
        from_main(self._mesh, self._refuse_others)
        state.settle()
        meta = {**state.meta(), "extra": dict(extra or {})}
        saved = checkpointer.save(state.tensors(), meta, to_yaml(self.config), None, self._log)
        self._own.add(saved.resolve())
        return saved

    def load(self, folder: str | Path | None = None) -> Loaded:
        """Restore weights, optimizer state, step and loss scale, and return the step and the saved `extra`.

        `folder` is a checkpoint or a run folder, by default run.dir. Of a run folder, the newest intact checkpoint is
        loaded. The checkpoint may have been saved on another layout. Raises ConfigError if there is no intact
        checkpoint, or if it does not fit the module.
        """
        self._checkpointer.finish()
        mesh, state, path = self._mesh, self._state, str(folder or self.config.run.dir)
        check = partial(verify_together, log=self._log, mesh=mesh)
        checkpoint = first_intact(from_main(mesh, lambda: candidates(path, "folder")), path, "folder", self._log, check)
        notes = state.load(checkpoint, self._log)
        meta = from_main(mesh, lambda: read_manifest(checkpoint).meta)
        for note in (*notes, *state.load_meta(meta)):
            self._log(note)
        self._own.add(checkpoint.resolve())
        return Loaded(state.step, meta.get("extra", {}))

    def close(self) -> None:
        """Wait for a save in progress, and leave the process group if `initialize` joined it."""
        self._checkpointer.close(self._log)
        self._state.loader.close()
        self._held.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        # After an exception other ranks may be gone, and closing would wait for them.
        if kind is None or self._mesh.world_size == 1:
            self.close()

    def _passes_for(self, batches: list[SampleBatch]) -> OnePart | Pipeline:
        """Return the object that runs these micro-batches. In a pipeline, raises ConfigError if the shapes of the
        micro-batches differ, or if the schedule cannot run this number of micro-batches."""
        layout, shape = self.config.parallelism, None
        example = single_input(batches[0].tokens, layout.pipeline)
        if layout.pipeline > 1:
            check_micro_batches(layout, len(batches))
            shape, *others = {each.tokens.shape for each in batches}
            if others:
                raise ConfigError(
                    f"batch: a pipeline needs micro-batches of equal shapes, but there are inputs of shapes {[*shape]} "
                    f"and {[*others[0]]}"
                )
        if self._passes is None or self._shape != shape:
            self._shape = shape
            self._passes = build_passes(
                self._state.model,
                self._state.runner,
                layout,
                micro_batches=len(batches),
                micro_batch_size=len(batches[0].targets),
                sequence_length=1,
                example=example,
            )
        return self._passes

    def _refuse_others(self) -> None:
        """Raise ConfigError if this engine has neither saved nor loaded the newest checkpoint in the folder."""
        root = self._checkpointer.root
        held = step_folders(root)
        if held and held[0].resolve() not in self._own:
            raise ConfigError(f"{root} already holds {held[0].name}, which this engine has neither saved nor loaded; "
                              "load it first, or give another folder")  # fmt: skip
