"""Optimizer step: forward and backward passes over the micro-batches, gradient clipping and the update."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from gptlite.errors import RunEnded
from gptlite.models.metrics import Recording
from gptlite.models.parallelize import finish_gradients
from gptlite.optimizer.clip import local_grad_norm
from gptlite.optimizer.fused import FusedStep, clip_and_step
from gptlite.optimizer.rounded import set_step
from gptlite.optimizer.schedule import set_lr
from gptlite.parallelism.axes import CONTEXT, DATA_AXES
from gptlite.parallelism.boxes import copies
from gptlite.parallelism.collectives import all_reduce
from gptlite.parallelism.host_copy import HostCopy, to_device
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.pipeline import MicroBatches, OnePart, Pipeline
from gptlite.parallelism.tensor import is_cut, of_experts
from gptlite.trainer.decisions import Decisions
from gptlite.trainer.loads import Loads
from gptlite.trainer.loss_scale import SCALE_VALUES
from gptlite.trainer.signals import Stopping
from gptlite.trainer.state import Progress, TrainState


class Diverged(RunEnded):
    """Raised for a non-finite loss or gradient if no smaller loss scale is available.

    The parameters are unchanged by the step. `what` describes the loss and norm, without the step number.
    """

    word = "diverged"
    advice = (
        ". Stopped with the parameters of the previous step; earlier checkpoints are intact. "
        "Try a lower optimizer.lr (now {lr:g}), more schedule.warmup_steps, or optimizer.clip_norm=1"
    )

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"step {step}: {what}")
        self.what = what


@dataclass(frozen=True)
class StepResult:
    """Result of a step: mean loss in nats per token, gradient norm before clipping, and learning rate.

    Loss and norm are unscaled. `loss_scale` is None without loss scaling. `skipped` is True if the step overflowed and
    was not applied. `step` is the step number, from 1. The global batch has `samples` samples, from position `begin` up
    to `stop` in the data order. `tokens` is the run's total, including this step. `metrics` has the means of the
    model's own metrics over the batch's targets and, for a mixture of experts, the metrics of the loads `experts`.
    """

    loss: float
    grad_norm: float
    lr: float
    loss_scale: float | None = None
    skipped: bool = False
    step: int = 0
    begin: int = 0
    stop: int = 0
    samples: int = 0
    tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    experts: Loads | None = None


@dataclass(frozen=True)
class Step:
    """Callable that runs one optimizer step.

    The fields do not change between steps: the mesh, the object that runs the forward and backward passes, the peak
    learning rate, the gradient clipping norm, and the stop flags, which each step exchanges.
    """

    mesh: Mesh
    passes: OnePart | Pipeline
    peak_lr: float
    clip_norm: float
    stopping: Stopping

    def __call__(self, state: TrainState, inspect: Callable[[TrainState], None] | None = None) -> StepResult:
        """Run one step and wait for its result; see `begin`."""
        return self.begin(state, inspect)()

    def begin(
        self,
        state: TrainState,
        inspect: Callable[[TrainState], None] | None = None,
        decisions: Decisions | None = None,
    ) -> Callable[[], StepResult]:
        """Run an optimizer step, advance the state, and return a function that waits for the result.

        The loss is a sum over tokens divided once by the number of valid tokens of the global batch, so it does not
        depend on the split into micro-batches and ranks. A loss scale multiplies the loss. If the scaled loss or
        gradient overflows, the step is counted but not applied. `inspect(state)` is called when the gradients are
        complete, before they are clipped and divided by the loss scale.

        Without `decisions`, the host waits for loss and norm before the update, and Diverged is raised here, before the
        parameters change. With `decisions`, the host does not wait. From a step that diverges on, the device leaves the
        parameters unchanged. Reading that step's result raises Diverged and restores the state's progress.
        """
        loader, before = state.loader, state.progress
        batches = [loader.batch(before.consumed, index) for index in range(loader.micro_batches(before.consumed))]
        # Counted before the passes, in which each micro-batch's loss is divided by the count.
        valid = torch.stack([state.model.count(batch.targets) for batch in batches]).sum()
        all_reduce(valid, self.mesh, DATA_AXES)
        # With decisions, the host's loss scale is one step behind the device's.
        scale = decisions.scale if decisions else state.scaler.scale if state.scaler else 1.0
        if not state.model.spec.keyed_dropout:
            self._seed(loader.stream.seed, before.step)
        divisor = valid / scale if state.scaler else valid
        state.model.spec.begin_step(state.model.config, state.parts, 1 / divisor)
        total = self.passes.run(
            MicroBatches(
                [batch.tokens for batch in batches],
                [batch.targets for batch in batches],
                [batch.sample_ids for batch in batches],
                [batch.documents for batch in batches if batch.documents is not None] or None,
            ),
            divisor,  # dividing the loss by valid / scale also multiplies it by the scale
        )
        loads = finish_gradients(state.model, state.parts, self.mesh)
        if inspect is not None:
            inspect(state)
        forward = self.passes.forward
        own = forward.take(total.device) if isinstance(forward, Recording) else None
        norm, sums = self._settle(state, total, own)
        if own is not None:  # already summed over ranks
            sums = torch.cat([sums, valid.to(sums)[None]])
        if loads is not None:
            sums = torch.cat([sums.double(), loads.flatten()])  # equal on all ranks
        lr, size = self.peak_lr * state.schedule.factor(state.schedule_step), loader.schedule.size(before.consumed)
        after = Progress(
            before.step + 1,
            loader.schedule.after(before.consumed),
            # With context parallelism, a rank holds only a slice of each sequence.
            before.tokens + size * batches[0].length * self.mesh.size(CONTEXT),
        )
        about = _About(before, after, size, lr, None if loads is None else (loads.shape[0], loads.shape[1]))
        if decisions is None:
            result = self._result(state, about, sums.tolist())
            if not result.skipped:
                self._update(state, lr, norm, scale)
            if state.scaler is not None:
                state.scaler.update(overflow=result.skipped)
            result_of = partial(_known, result)
        else:
            self._update(state, lr, norm, scale, decisions.decide(sums))
            result_of = partial(self._arrived, state, about, HostCopy(decisions.with_scales(sums)))
        state.optimizer.zero_grad(set_to_none=True)
        state.progress = after
        return result_of

    def _seed(self, seed: int, step: int) -> None:
        """Seed torch's generators for a step, so that a resumed run draws the same dropout masks as without a stop."""
        key = f"{seed} {step} {self.mesh.data_rank} {self.mesh.coordinate('pp')}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) >> 1)

    def _update(
        self, state: TrainState, lr: float, norm: Tensor, scale: float | Tensor, found_inf: Tensor | None = None
    ) -> None:
        set_lr(state.optimizer, lr)
        set_step(state.optimizer, state.step)
        parameters = (p for part in state.parts for p in part.parameters())
        clip_and_step(state.optimizer, parameters, self.clip_norm, norm, scale, found_inf)

    def _arrived(self, state: TrainState, about: "_About", copy: HostCopy) -> StepResult:
        """Wait for the values of a step with on-device decisions, and return its result. Raises Diverged."""
        values = copy.tolist()
        count = len(SCALE_VALUES) if state.scaler else 0
        scales, values = values[len(values) - count :], values[: len(values) - count]
        try:
            result = self._result(state, about, values)  # uses state.scaler, still with the scale of this step
        except Diverged:
            state.progress = about.before  # the device has not applied any later step
            raise
        if state.scaler is not None:
            state.scaler.take(scales)
        return result

    def _result(self, state: TrainState, about: "_About", values: list[float]) -> StepResult:
        """Return the result of a step from `values`, the sums over all ranks. Raises Diverged."""
        names, scaler, metrics, experts = state.model.spec.metrics, state.scaler, {}, None
        if about.loads is not None:
            rows, columns = about.loads
            values, table = values[: -rows * columns], values[-rows * columns :]
            experts = Loads.of(table, columns, about.after.tokens - about.before.tokens)
        if names:
            *values, valid = values
            values, sums = values[: -len(names)], values[-len(names) :]
            metrics = {name: total / valid if valid else math.nan for name, total in zip(names, sums, strict=True)}
        loss, norm, *words = values
        if words:
            self.stopping.heard(words)
            norm = math.sqrt(norm) if norm >= 0 else math.nan  # with several ranks, the square is summed
        scale = scaler.scale if scaler else 1.0
        loss, norm = loss / scale, norm / scale
        finite = math.isfinite(loss) and math.isfinite(norm)
        if not finite and (scaler is None or scaler.exhausted):
            at = f", at loss scale {scale:g}, which cannot be reduced further" if scaler else ""
            raise Diverged(about.after.step, f"loss {loss}, gradient norm {norm}{at}")
        return StepResult(
            *(loss, norm, about.lr, scale if scaler else None, not finite),
            step=about.after.step,
            begin=about.before.consumed,
            stop=about.after.consumed,
            samples=about.samples,
            tokens=about.after.tokens,
            metrics=metrics | (experts.metrics() if experts else {}),
            experts=experts,
        )

    def _settle(self, state: TrainState, total: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the gradient norm and the sums for the host, both on the device. `own`: sums of the model's metrics.

        With one rank, the sums are loss, norm and `own`. With several ranks, they are loss, squared norm, stop flags
        and `own`, summed over ranks.
        """
        fused = isinstance(state.optimizer, FusedStep)
        if self.mesh.world_size == 1:
            norm = local_grad_norm((p for part in state.parts for p in part.parameters()), fused)
            sums = torch.stack([total, norm.to(total.device)])
            return norm, sums if own is None else torch.cat([sums.double(), own])
        mesh = self.mesh
        computes = mesh.is_first("uncut")
        # Count each gradient element on only one of the ranks that hold it.
        first = mesh.is_first("all")
        alone = all(mesh.coordinate(axis) == 0 for axis in DATA_AXES)
        counted = (p for p in state.weights() if _counts(p, first if p.ndim else alone, computes))
        # fp64: the square of a norm above 1.8e19 would overflow fp32.
        square = local_grad_norm(counted, fused).double() ** 2
        loss = total.double() if computes else torch.zeros_like(total, dtype=torch.float64)
        words = to_device(self.stopping.words(), loss.device)  # part of the same all-reduce, so stopping needs no other
        parts = [torch.stack([loss, square.to(loss.device)]), words]
        if own is not None:
            parts.append(own if computes else torch.zeros_like(own))
        sums = all_reduce(torch.cat(parts), mesh)
        return sums[1].sqrt().float(), sums


@dataclass(frozen=True)
class _About:
    """Values of a step that the host knows without reading from the device."""

    before: Progress
    after: Progress
    samples: int
    lr: float
    loads: tuple[int, int] | None  # shape of the table of expert loads, if any


def _counts(parameter: Tensor, first: bool, computes: bool) -> bool:
    """Return True on exactly one of the ranks that hold the same shard of a parameter.

    `first`: this rank is the first along the data axes that replicate this kind of parameters. `computes`: it is the
    first along the axes that replicate parameters not sharded by tensor parallelism.
    """
    if of_experts(parameter):  # sharded in the experts' mesh
        return all(cut.rank == 0 for cut in copies(parameter))
    return first and (computes or is_cut(parameter))


def _known(result: StepResult) -> StepResult:
    return result
