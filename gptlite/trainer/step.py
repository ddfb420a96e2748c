"""One optimizer step: forward and backward over the micro-batches, clip, update."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gptlite.data.loader import IGNORE
from gptlite.model.parallelize import finish_gradients
from gptlite.optimizer.clip import local_grad_norm
from gptlite.optimizer.fused import FusedStep, clip_and_step
from gptlite.optimizer.rounded import set_step
from gptlite.optimizer.schedule import set_lr
from gptlite.parallelism.collectives import all_reduce
from gptlite.parallelism.layout import CONTEXT
from gptlite.parallelism.mesh import DATA_AXES, Mesh
from gptlite.parallelism.pipeline import MicroBatches, OnePart, Pipeline
from gptlite.parallelism.tensor import is_cut
from gptlite.trainer.signals import Stopping
from gptlite.trainer.state import TrainState


class Diverged(RuntimeError):
    """The loss or the gradient is not finite, and no smaller loss scale is left to try.

    The parameters are those of the step before. `what` says which, without the step.
    """

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"step {step}: {what}")
        self.what = what


@dataclass(frozen=True)
class StepResult:
    """Mean loss in nats per token, gradient norm before clipping, and the rate the step was taken at.

    With a loss scale also that, which the other two are without; a step that overflowed was `skipped`.
    """

    loss: float
    grad_norm: float
    lr: float
    loss_scale: float | None = None
    skipped: bool = False


@dataclass(frozen=True)
class Step:
    """How a step is taken: over which ranks, at which peak rate, clipped to which norm."""

    mesh: Mesh
    passes: OnePart | Pipeline
    peak_lr: float
    clip_norm: float
    stopping: Stopping

    def __call__(self, state: TrainState, inspect: Callable[[TrainState], None] | None = None) -> StepResult:
        """Takes the optimizer step `state.step` and advances the state. Raises Diverged before the parameters change.

        The loss is a sum over tokens divided once by the number of valid tokens of the global batch, so it does not
        depend on how the batch is cut into micro-batches and over ranks. A loss scale multiplies it; where it makes
        something overflow, the step counts, but the optimizer does not take it. `inspect` is called with the gradients
        complete, before they are clipped and the loss scale is divided out.
        """
        loader, consumed = state.loader, state.consumed_samples
        batches = [loader.batch(consumed, index) for index in range(loader.micro_batches(consumed))]
        valid = torch.stack([(batch.targets != IGNORE).sum() for batch in batches]).sum()
        all_reduce(valid, self.mesh, DATA_AXES)
        scale = state.scaler.scale if state.scaler else 1.0
        total = self.passes.run(
            MicroBatches(
                [batch.tokens for batch in batches],
                [batch.targets for batch in batches],
                [batch.sample_ids for batch in batches],
                [batch.documents for batch in batches if batch.documents is not None] or None,
            ),
            valid / scale if state.scaler else valid,
        )
        finish_gradients(state.parts, self.mesh)
        if inspect is not None:
            inspect(state)
        norm, loss_value, norm_value = self._settle(state, total)
        loss_value, norm_value = loss_value / scale, norm_value / scale
        finite = math.isfinite(loss_value) and math.isfinite(norm_value)
        if not finite and (state.scaler is None or state.scaler.exhausted):
            words = f", at a loss scale of {scale:g} that goes no lower" if state.scaler else ""
            raise Diverged(state.step + 1, f"loss {loss_value}, gradient norm {norm_value}{words}")
        lr = self.peak_lr * state.schedule.factor(state.step)
        if finite:
            set_lr(state.optimizer, lr)
            set_step(state.optimizer, state.step)
            parameters = (p for part in state.parts for p in part.parameters())
            clip_and_step(state.optimizer, parameters, self.clip_norm, norm, scale)
        if state.scaler is not None:
            state.scaler.update(overflow=not finite)
        state.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        state.consumed_samples = loader.schedule.after(consumed)
        state.tokens += loader.schedule.size(consumed) * batches[0].tokens.shape[1] * self.mesh.size(CONTEXT)
        return StepResult(loss_value, norm_value, lr, scale if state.scaler else None, not finite)

    def _settle(self, state: TrainState, total: Tensor) -> tuple[Tensor, float, float]:
        """The gradient norm on the device, then loss and norm as numbers: the step's one wait for device and ranks."""
        fused = isinstance(state.optimizer, FusedStep)
        if self.mesh.world_size == 1:
            norm = local_grad_norm((p for part in state.parts for p in part.parameters()), fused)
            loss_value, norm_value = torch.stack([total, norm.to(total.device)]).tolist()
            return norm, loss_value, norm_value
        mesh = self.mesh
        first_of_tensor = mesh.coordinate("tp") == 0
        # Each element of the gradient on one of the ranks that hold it.
        counted = state.weights() if mesh.coordinate("dp_replicate") == 0 else ()
        square = local_grad_norm((p for p in counted if first_of_tensor or is_cut(p)), fused).double() ** 2
        loss = total.double() if first_of_tensor else torch.zeros_like(total, dtype=torch.float64)
        sums = torch.cat([torch.stack([loss, square.to(loss.device)]), self.stopping.words().to(loss.device)])
        sums = all_reduce(sums, mesh)
        norm = sums[1].sqrt().float()
        values = sums.tolist()
        self.stopping.heard(values[2:])
        return norm, values[0], math.sqrt(values[1]) if values[1] >= 0 else math.nan
