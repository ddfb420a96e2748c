"""Training state, which checkpoints store."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gptlite.checkpoint.load import load_tensors
from gptlite.checkpoint.manifest import read_manifest
from gptlite.data.batch_loader import BatchLoader
from gptlite.models.model import Model
from gptlite.optimizer.schedule import Schedule
from gptlite.optimizer.state import optimizer_state, take_optimizer_state
from gptlite.parallelism.boxes import local_tensor, num_local_elements
from gptlite.parallelism.rank_sync import from_main
from gptlite.parallelism.reduction import PREFIX
from gptlite.parallelism.stage_runner import StageRunner
from gptlite.progress import Log
from gptlite.trainer.loss_scale import LossScaler
from gptlite.trainer.saved_meta import checked_meta
from gptlite.trainer.spike import SpikeWatch
from gptlite.trainer.totals import GradientNoise


def model_tensors(model: Model, parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return parameters and buffers by global name, in checkpoint form: bf16 parameters are copied to fp32.

    A tied parameter has one key on all ranks, regardless of which of its copies a rank holds.
    """
    tensors: dict[str, Tensor] = {}
    for part in parts:
        for name, parameter in model.named_weights(part):
            if f"model.{name}" not in tensors:  # keep the first copy of a tied parameter
                tensors[f"model.{name}"] = parameter.detach().float()
        tensors |= {f"model.{name}": buffer for name, buffer in model.named_buffers(part)}
    return tensors


@torch.no_grad()
def take_model_tensors(model: Model, parts: Sequence[nn.Module], tensors: dict[str, Tensor]) -> int:
    """Copy loaded values from the result of `model_tensors` to bf16 parameters. fp32 tensors share the model's memory.

    Returns the number of this rank's elements that rounding to bf16 changes.
    """
    count = 0
    for part in parts:
        for name, parameter in model.named_weights(part):
            if parameter.dtype != torch.float32:
                mine, given = local_tensor(parameter).detach(), local_tensor(tensors[f"model.{name}"]).detach()
                mine.copy_(given)
                count += int((mine != given).sum())
    return count


@dataclass(frozen=True)
class TrainingProgress:
    """Training progress: completed optimizer steps, and the samples and tokens that they consumed."""

    step: int
    consumed: int
    tokens: int


@dataclass
class TrainState:
    """Model parts, optimizer, schedule, data loader and training progress.

    There is no RNG state, since dropout and the data order are functions of the seed and the training progress.
    """

    model: Model
    runner: StageRunner
    optimizer: Optimizer
    schedule: Schedule
    loader: BatchLoader
    data_identity: dict[str, Any]  # compared at resume, to detect changed data
    step: int = 0  # completed optimizer steps
    consumed_samples: int = 0
    tokens: int = 0
    best_val_loss: float = math.inf  # nats per token
    evaluated_step: int = 0  # step of the last evaluation
    wandb_id: str | None = None
    scaler: LossScaler | None = None  # None unless the run computes in fp16
    spikes: SpikeWatch | None = None  # None unless trainer.spike.policy is skip
    noise: GradientNoise | None = None  # None unless the run estimates it

    def settle(self) -> None:
        """Make the data ranks' copies equal, if their steps are apart. Call it before an evaluation or a save."""
        if self.runner.mesh.reduction is not None:
            self.runner.mesh.reduction.settle()

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors in checkpoint form: the live tensor, or an fp32 copy if the run uses another form.

        Call `take` after writing to the tensors.
        """
        reduction = self.runner.mesh.reduction
        extra = {} if reduction is None else reduction.tensors()
        return model_tensors(self.model, self.parts) | optimizer_state(self.optimizer) | extra

    def take(self, tensors: dict[str, Tensor]) -> list[str]:
        """Apply loaded values in the result of `tensors` or `model_tensors` to the run. Returns notes to print.

        Updates the parameters and optimizer state of which `tensors` has copies, and this rank's second copies of tied
        parameters.
        """
        count = take_model_tensors(self.model, self.parts, tensors)
        if any(key.startswith("optim.") for key in tensors):
            take_optimizer_state(self.optimizer, tensors)
        self.refresh_copies()
        return [f"{count:,} weights are rounded to bf16 (precision.master_weights=false)"] if count else []

    def load(self, path: Path, log: Log) -> list[str]:
        """Fill all tensors from a step folder that has been found intact. Collective. Returns notes to print."""
        mesh = self.runner.mesh
        tensors = model_tensors(self.model, self.parts) | optimizer_state(self.optimizer)
        load_tensors(path, tensors, verified=True, log=log, mesh=mesh)
        notes = self.take(tensors)
        stored = from_main(mesh, lambda: [key for key in read_manifest(path).tensors if key.startswith(PREFIX)])
        if mesh.reduction is None:
            return [*notes, "the checkpoint's compression errors are dropped"] if stored else notes
        tensors = mesh.reduction.requested(stored)
        load_tensors(path, tensors, strict=False, verified=True, log=log, mesh=mesh)
        return notes + mesh.reduction.take(tensors)

    @property
    def progress(self) -> TrainingProgress:
        """`step`, `consumed_samples` and `tokens` as one value."""
        return TrainingProgress(self.step, self.consumed_samples, self.tokens)

    @progress.setter
    def progress(self, progress: TrainingProgress) -> None:
        self.step, self.consumed_samples, self.tokens = progress.step, progress.consumed, progress.tokens

    @property
    def gained(self) -> float:
        """Steps by which the schedule's clock is ahead of `step`; 0 without AdaScale."""
        return self.noise.gained if self.noise else 0.0

    @property
    def clock(self) -> float:
        """The schedule's clock, at which a run ends: the number of steps taken, each as long as its gain."""
        return self.step + self.gained

    @property
    def schedule_step(self) -> int:
        """Step of the learning-rate schedule: its clock, less the steps skipped by DeepSpeed's rule."""
        return max(0, int(self.clock) - (self.scaler.skipped if self.scaler and self.scaler.deepspeed else 0))

    @property
    def parts(self) -> list[nn.Module]:
        """Model parts on this rank. Without a pipeline, there is one part."""
        return self.runner.parts

    def weights(self) -> Iterator[nn.Parameter]:
        """Yield every parameter of this rank's parts, except second copies of tied parameters."""
        copies = {id(copy) for _, copy in self.model.tied_copies(self.parts)}
        for part in self.parts:
            yield from (parameter for parameter in part.parameters() if id(parameter) not in copies)

    def steps_until(self, clock: int) -> int:
        """Return the number of the step that takes the schedule's clock to `clock`, if later steps gain as the last."""
        return self.step + max(0, math.ceil((clock - self.clock) / (self.noise.gain if self.noise else 1)))

    def remaining_batches(self, max_steps: int) -> float:
        """Return the number of full-size global batches with as many samples as the steps left until `max_steps`."""
        schedule = self.loader.schedule
        end = schedule.after(self.consumed_samples, self.steps_until(max_steps) - self.step)
        return (schedule.trained(end) - schedule.trained(self.consumed_samples)) / schedule.global_batch_size

    def refresh_copies(self) -> None:
        """Copy a tied parameter's values and optimizer state to its second copy, if this rank holds both."""
        for owner, copy in self.model.tied_copies(self.parts):
            if owner is None or copy is None:
                continue
            with torch.no_grad():
                copy.copy_(owner)
            theirs = self.optimizer.state[copy]
            for key, value in self.optimizer.state[owner].items():
                if key in theirs and isinstance(value, Tensor):
                    theirs[key].copy_(value)  # in place, as the tensor may be mapped from a file
                else:
                    theirs[key] = value.clone() if isinstance(value, Tensor) else value

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter of this rank's parts with its global name. Tied copies have the same name."""
        for part in self.parts:
            yield from self.model.named_weights(part)

    def tied_names(self) -> list[str]:
        """Return the names of the parameters that both the first and the last pipeline stage hold."""
        return sorted(set(self.model.tied.values()))

    def num_bytes(self) -> int:
        """Return the size in bytes of this rank's part of a checkpoint's tensors."""
        return sum(num_local_elements(tensor) * tensor.element_size() for tensor in self.tensors().values())

    def meta(self) -> dict[str, Any]:
        """Return the state other than tensors, in JSON form."""
        best = self.best_val_loss if math.isfinite(self.best_val_loss) else None  # JSON has no infinity
        return {
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "tokens": self.tokens,
            "best_val_loss": best,
            "evaluated_step": self.evaluated_step,
            "wandb_id": self.wandb_id,
            "data_identity": self.data_identity,
            "data_order": [era.to_json() for era in self.loader.stream.eras],
            "loss_scale": self.scaler.meta() if self.scaler else None,
            "skipped_samples": self.loader.schedule.skipped,
            "spikes": self.spikes.meta() if self.spikes else None,
            **({"noise": self.noise.meta()} if self.noise else {}),
        }

    def load_meta(self, meta: dict[str, Any]) -> list[str]:
        """Restore the state returned by `meta`. Returns notes to print, such as on values that cannot be restored.

        Raises ConfigError for values that no run writes.
        """
        meta = checked_meta(meta)
        self.step, self.consumed_samples = meta["step"], meta["consumed_samples"]
        self.tokens, self.wandb_id = meta["tokens"], meta["wandb_id"]
        self.evaluated_step = meta["evaluated_step"]
        self.best_val_loss = math.inf if meta["best_val_loss"] is None else meta["best_val_loss"]
        # Older checkpoints lack the following keys.
        self.loader.schedule = replace(self.loader.schedule, skipped=()).skipping(meta.get("skipped_samples", ()))
        if self.spikes is not None:
            self.spikes.load_meta(meta.get("spikes"))
        if self.noise is not None:
            self.noise.load_meta(meta.get("noise"))
        return [*self._load_order(meta), *self._load_scale(meta.get("loss_scale"))]

    def _load_order(self, meta: dict[str, Any]) -> list[str]:
        stream = self.loader.stream
        if (eras := meta.get("data_order")) is None:  # older checkpoints have a single era with one data set
            history = [replace(stream.eras[-1], sequence_length=int(meta["data_identity"]["sequence_length"]))]
        else:
            history = eras
        self.loader.resume(history, self.consumed_samples)
        now = self.loader.stream.eras
        if self.consumed_samples and now[-1].start == self.consumed_samples:
            return [f"data order: from sample {self.consumed_samples:,} on, {now[-1].describe()}"]
        return []

    def _load_scale(self, scale: dict[str, Any] | None) -> list[str]:
        if self.scaler is None:
            return [f"the checkpoint's loss scale, {scale['scale']:g}, is ignored; only fp16 uses it"] if scale else []
        if scale is None:
            return [f"the checkpoint has no loss scale; the loss scale starts at {self.scaler.scale:g}"]
        self.scaler.load_meta(scale)
        return []
