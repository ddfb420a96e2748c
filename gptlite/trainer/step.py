"""Optimizer step: forward and backward passes over the micro-batches, gradient clipping and the update."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from gptlite.data.batch_loader import Batch
from gptlite.errors import RunEnded
from gptlite.models.metrics import Recording
from gptlite.models.parallelize import finish_gradients
from gptlite.optimizer.fused import clip_and_step, grad_norm
from gptlite.optimizer.rounded import set_step
from gptlite.optimizer.schedule import set_lr
from gptlite.parallelism.axes import CONTEXT, DATA_AXES
from gptlite.parallelism.boxes import copies
from gptlite.parallelism.collectives import all_reduce
from gptlite.parallelism.host_copy import HostCopy, to_device
from gptlite.parallelism.in_files import finish_backward
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.pipeline import MicroBatches, OnePart, Pipeline
from gptlite.parallelism.reduction import Reduction
from gptlite.parallelism.tensor import is_cut, of_experts
from gptlite.trainer.loss_scale import Decisions
from gptlite.trainer.signals import Stopping
from gptlite.trainer.state import TrainingProgress, TrainState
from gptlite.trainer.totals import Loads, StepTotals

Execute = Callable[..., tuple[StepTotals, Tensor]]
Inspect = Callable[[TrainState], None]


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
    learning rate, the gradient clipping norm, the stop flags, which each step exchanges, and what calls `_on_device`,
    if it is not called directly.
    """

    mesh: Mesh
    passes: OnePart | Pipeline
    peak_lr: float
    clip_norm: float
    stopping: Stopping
    execute: Execute | None = None

    def __call__(self, state: TrainState, inspect: Inspect | None = None) -> StepResult:
        """Run one step and wait for its result; see `begin`."""
        return self.begin(state, inspect)()

    def begin(
        self, state: TrainState, inspect: Inspect | None = None, decisions: Decisions | None = None
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
        before, loader = state.progress, state.loader
        batches = [loader.batch(before.consumed, index) for index in range(loader.micro_batches(before.consumed))]
        counters = self._counters(state, batches[0].length)
        if not state.model.spec.keyed_dropout:
            self._seed(loader.stream.seed, state.step)
        if decisions is None:
            scale = state.scaler.scale if state.scaler else 1.0
            totals = self._gradients(state, batches, scale, inspect)
            result = self._result(state, counters, totals.unpack(totals.pack().cpu()))
            if not result.skipped:
                set_lr(state.optimizer, result.lr)
                self._update(state, totals.norm, scale)
            if state.scaler is not None:
                state.scaler.update(overflow=result.skipped)
            state.optimizer.zero_grad(set_to_none=True)
            result_of = partial(replace, result)
        else:
            set_lr(state.optimizer, counters.lr)
            enqueue = partial(self.execute, self._on_device) if self.execute else self._on_device
            totals, packed = enqueue(state, batches, decisions)
            result_of = partial(self._arrived, state, counters, totals, HostCopy(packed))
        state.progress = counters.after
        return result_of

    def _on_device(
        self, state: TrainState, batches: Sequence[Batch], decisions: Decisions
    ) -> tuple[StepTotals, Tensor]:
        """Enqueue a whole step on the device, from its batches to the update. Return its totals, and these in one
        vector. Nothing here depends on the host's counters, so a CUDA graph can replay it."""
        scale = decisions.scale  # the host's loss scale is one step behind the device's
        skips, totals = decisions.decide(self._gradients(state, batches, scale))
        self._update(state, totals.norm, scale, skips)
        state.optimizer.zero_grad(set_to_none=True)
        return totals, totals.pack()

    def _gradients(
        self, state: TrainState, batches: Sequence[Batch], scale: float | Tensor, inspect: Inspect | None = None
    ) -> StepTotals:
        """Compute the gradients of the global batch, and return the totals of all ranks, on the device."""
        # Counted before the passes, in which each micro-batch's loss is divided by the count.
        counts = torch.stack([state.model.count(batch.targets) for batch in batches])
        targets = counts.sum()
        all_reduce(targets, self.mesh, DATA_AXES)
        # Each loss is divided by the number of targets of the global batch over the loss scale.
        divisor = targets / scale if state.scaler else targets
        state.model.spec.begin_step(state.model.config, state.parts, 1 / divisor)
        micro_batches = MicroBatches(
            [batch.tokens for batch in batches],
            [batch.targets for batch in batches],
            [batch.sample_ids for batch in batches],
            [batch.documents for batch in batches if batch.documents is not None] or None,
        )
        losses = self.passes.run(micro_batches, divisor)
        loss = (self.mesh.reduction or Reduction()).complete(losses, torch.zeros((), device=divisor.device))
        finish_backward(state.optimizer)
        loads = finish_gradients(state.model, state.parts, self.mesh)
        if inspect is not None:
            inspect(state)
        noise = None if state.noise is None else state.noise.share(counts)
        return replace(self._total(state, loss, noise), targets=targets, loads=loads)

    def _seed(self, seed: int, step: int) -> None:
        """Seed torch's generators for a step, so that a resumed run draws the same dropout masks as without a stop."""
        key = f"{seed} {step} {self.mesh.data_rank} {self.mesh.coordinate('pp')}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) >> 1)

    def _total(self, state: TrainState, loss: Tensor, noise: Tensor | None) -> StepTotals:
        """Return the totals over all ranks, on the device. `loss` and `noise` are this rank's shares."""
        forward = self.passes.forward
        metrics = forward.take(loss.device) if isinstance(forward, Recording) else None
        mesh = self.mesh
        if mesh.world_size == 1 and mesh.reduction is None:
            norm = grad_norm(state.optimizer, (p for part in state.parts for p in part.parameters()))
            return StepTotals(loss=loss, norm=norm.to(loss.device), metrics=metrics, noise=noise)
        computes = mesh.is_first("uncut")
        # Count each gradient element on only one of the ranks that hold it.
        first = mesh.is_first("all")
        alone = all(mesh.coordinate(axis) == 0 for axis in DATA_AXES)
        counted = [p for p in state.weights() if _counts(p, first if p.ndim else alone, computes)]

        def dense() -> Tensor:  # fp64: the square of a norm above 1.8e19 would overflow fp32
            return grad_norm(state.optimizer, counted).double() ** 2

        square = dense() if mesh.reduction is None else mesh.reduction.gradient_square(counted, dense)
        share = StepTotals(
            loss=loss if computes else torch.zeros_like(loss),
            norm=square.to(loss.device),
            # Part of the same all-reduce, so stopping needs no other.
            flags=to_device(self.stopping.words(), loss.device),
            metrics=metrics if metrics is None or computes else torch.zeros_like(metrics),
            noise=noise,
        )
        totals = share.unpack(all_reduce(share.pack(), mesh))
        return replace(totals, norm=totals.norm.sqrt(), square=totals.norm)

    def _counters(self, state: TrainState, length: int) -> "_Counters":
        """Return what the host knows of the step. `length` is that of this rank's slice of the sequences."""
        before, schedule = state.progress, state.loader.schedule
        samples = schedule.size(before.consumed)
        # With context parallelism, a rank holds only a slice of each sequence.
        tokens = samples * length * self.mesh.size(CONTEXT)
        after = TrainingProgress(before.step + 1, schedule.after(before.consumed), before.tokens + tokens)
        return _Counters(before, after, samples, self.peak_lr * state.schedule.factor(state.schedule_step))

    def _update(self, state: TrainState, norm: Tensor, scale: float | Tensor, skips: Tensor | None = None) -> None:
        set_step(state.optimizer, state.step)
        parameters = (p for part in state.parts for p in part.parameters())
        clip_and_step(state.optimizer, parameters, self.clip_norm, norm.float(), scale, skips)

    def _arrived(self, state: TrainState, counters: "_Counters", totals: StepTotals, copy: HostCopy) -> StepResult:
        """Wait for the totals of a step with on-device decisions, and return its result. Raises Diverged."""
        totals = totals.unpack(copy.wait())
        try:
            result = self._result(state, counters, totals)  # uses state.scaler, still with the scale of this step
        except Diverged:
            state.progress = counters.before  # the device has not applied any later step
            raise
        if state.scaler is not None and totals.scale is not None:
            state.scaler.take(totals.scale.tolist())
        return result

    def _result(self, state: TrainState, counters: "_Counters", totals: StepTotals) -> StepResult:
        """Return the result of a step from its totals, on the host. Raises Diverged."""
        scaler = state.scaler
        if totals.flags is not None:
            self.stopping.heard(totals.flags.tolist())
        scale = scaler.scale if scaler else 1.0
        # torch's square root on the CPU may be off by one unit in the last place (findings/torch_sqrt_rounding.sh).
        norm = totals.norm.item() if totals.square is None else math.sqrt(totals.square.item())
        loss, norm = totals.loss.item() / scale, norm / scale
        finite = math.isfinite(loss) and math.isfinite(norm)
        if not finite and (scaler is None or scaler.exhausted):
            at = f", at loss scale {scale:g}, which cannot be reduced further" if scaler else ""
            raise Diverged(counters.after.step, f"loss {loss}, gradient norm {norm}{at}")
        if state.noise is not None and finite:  # not ahead of this result: SGD, whose rate has a gain, has no lag
            after = counters.after
            state.noise.take(totals, counters.samples, scale, after.step, after.consumed)
        experts = None
        if totals.loads is not None:
            experts = Loads.of(totals.loads.tolist(), counters.after.tokens - counters.before.tokens)
        return StepResult(
            loss=loss,
            grad_norm=norm,
            lr=counters.lr * (state.noise.gain if state.noise else 1.0),
            loss_scale=scale if scaler else None,
            skipped=not finite,
            step=counters.after.step,
            begin=counters.before.consumed,
            stop=counters.after.consumed,
            samples=counters.samples,
            tokens=counters.after.tokens,
            metrics=_means(state.model.spec.metrics, totals) | (experts.metrics() if experts else {}),
            experts=experts,
        )


@dataclass(frozen=True)
class _Counters:
    """Values of a step that the host knows without reading from the device."""

    before: TrainingProgress
    after: TrainingProgress
    samples: int
    lr: float


def _means(names: Sequence[str], totals: StepTotals) -> dict[str, float]:
    """Return the means over the targets of the model's own metrics, by name."""
    if totals.metrics is None or totals.targets is None:
        return {}
    targets = totals.targets.item()
    sums = zip(names, totals.metrics.tolist(), strict=True)
    return {name: total / targets if targets else math.nan for name, total in sums}


def _counts(parameter: Tensor, first: bool, computes: bool) -> bool:
    """Return True on exactly one of the ranks that hold the same shard of a parameter.

    `first`: this rank is the first along the data axes that replicate this kind of parameters. `computes`: it is the
    first along the axes that replicate parameters not sharded by tensor parallelism.
    """
    if of_experts(parameter):  # sharded in the experts' mesh
        return all(cut.rank == 0 for cut in copies(parameter))
    return first and (computes or is_cut(parameter))
