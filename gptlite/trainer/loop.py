"""Training loop: optimizer steps, with evaluations, checkpoints and stop checks in between."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from gptlite.checkpoint.config import CheckpointConfig
from gptlite.optimizer.config import OptimizerConfig
from gptlite.parallelism.pipeline import OnePart, Pipeline
from gptlite.trainer.config import TrainerConfig
from gptlite.trainer.eval import Evaluation, evaluate_sets
from gptlite.trainer.profile import StepProfiler
from gptlite.trainer.report import Reporter
from gptlite.trainer.signals import Stopping, StopSignal
from gptlite.trainer.spike import Spike, Spiked
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Diverged, Step, StepResult
from gptlite.trainer.steps import Steps, lag_of
from gptlite.trainer.watch import Watch

SLOW_DISK = 200e6  # bytes per second, for an estimate of the duration of the first save


class Ending(Enum):
    """Reason why a run ended. The values are written to result.json."""

    done = "done"
    stop_step = "stopped: trainer.stop_step"
    max_time = "stopped: trainer.max_time"
    signal = "stopped: signal"


@dataclass(frozen=True)
class Settings:
    """Configuration sections used by the loop."""

    trainer: TrainerConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig


@dataclass(frozen=True)
class Outcome:
    """Result of training: reason for the end, last evaluation, last checkpoint. `exit_code`: 128 + signal, or 0."""

    ending: Ending
    evaluation: Evaluation | None
    checkpoint: Path
    exit_code: int = 0


class Saves(Protocol):
    """Interface of the object that saves and restores the training state."""

    @property
    def path(self) -> Path:
        """Folder of the run."""
        ...

    @property
    def save_seconds(self) -> float:
        """Duration of the longest save so far."""
        ...

    @property
    def save_failed(self) -> bool:
        """True if a background save has failed. `finish_saves` then raises its exception."""
        ...

    def save(self, state: TrainState) -> Path:
        """Save a checkpoint, or start a background save, and return its folder."""
        ...

    def finish_saves(self) -> None:
        """Wait until all started saves are committed."""
        ...

    def rewind(self, state: TrainState, spike: Spike) -> Path | None:
        """Restore the last checkpoint from before a spike's samples, and make the state skip these samples.

        Returns the checkpoint; None if there is none.
        """
        ...


class Clock:
    """Time limit `trainer.max_time`, with time for a save at the end.

    With a `lag`, the decision to stop reaches all ranks one step late, when up to two more steps are in progress.
    """

    def __init__(self, minutes: float | None, started: float, save_seconds: float, lag: int = 0) -> None:
        self.deadline = math.inf if minutes is None else started + 60 * minutes
        self.save_seconds, self._steps = save_seconds, 1.5 + 3 * lag
        self._step_seconds = 0.0
        self._mark = time.monotonic()

    def step(self) -> None:
        """Record the end of a step. A slower step raises the estimate at once, and faster steps lower it gradually."""
        now = time.monotonic()
        # A decaying maximum instead of a mean, since a low estimate could exceed the deadline.
        self._step_seconds, self._mark = max(0.9 * self._step_seconds, now - self._mark), now

    def mark(self) -> None:
        """Exclude the time since the last step from the duration of the next one."""
        self._mark = time.monotonic()

    def over(self) -> bool:
        """Return True if one more step and a save could exceed the deadline."""
        # Twice the duration of a save, as the next save may be slower than all before.
        return time.monotonic() + self._steps * self._step_seconds + 2 * self.save_seconds > self.deadline


def train(
    state: TrainState,
    passes: OnePart | Pipeline,
    settings: Settings,
    reporter: Reporter,
    run: Saves,
    stop: StopSignal,
    watch: Watch,
    started: float,
    lag: int | None = None,
) -> Outcome:
    """Train until `trainer.max_steps`, `trainer.stop_step`, a signal or `trainer.max_time`, and save a checkpoint.

    `started` is the start of the process, in time.monotonic() seconds. With a `lag` of 1, the default on a GPU, a
    step's result is processed after the next step is enqueued, but before any other use of the state.

    Raises Diverged for a non-finite loss or gradient, Spiked for a spike after which the run cannot rewind,
    ReplicasDiffer if copies of a parameter differ, and the exception of a failed save. For a background save, this
    exception is raised at the next step. Earlier checkpoints are kept.
    """
    config, mesh = settings.trainer, state.runner.mesh
    lag = lag_of(state.optimizer, mesh.device, lag, state.scaler)
    clock = Clock(config.max_time, started, state.num_bytes() / SLOW_DISK, lag)
    profiler = StepProfiler(config.profile_steps, run.path, mesh.rank)
    stopping = Stopping(mesh, stop, clock.over, lambda: run.save_failed)
    steps = Steps(Step(mesh, passes, settings.optimizer.lr, settings.optimizer.clip_norm, stopping), lag)
    evaluation, checkpoint, saved, to_save = None, None, -1, False

    def pauses() -> bool:
        """Return True if anything reads the state before the next step, so that all results must be read first."""
        step, last = state.step, state.step + 1 == config.last_step
        intervals = (config.replica_check_interval, config.eval_interval, settings.checkpoint.interval)
        due = to_save or step == config.last_step or any(_due(step, interval) for interval in intervals)
        return due or step == profiler.last or reporter.memory.due(last)

    # If the run stopped before an evaluation that was due, evaluate now, as the uninterrupted run would have.
    if _due(state.step, config.eval_interval) and state.step < config.last_step:
        evaluation = _evaluate(state, config, reporter, stopping.poll)
    with closing(profiler):
        while (begins := state.step < config.last_step and not stopping.now) or steps.waiting:
            clock.mark()  # excludes evaluations and saves from the duration of a step
            if begins:
                profiler.before(state.step + 1)
            spike = None
            for result in _results(steps, begins, pauses, state, reporter, watch):
                if isinstance(result, Spike):
                    spike = result
                    break
                reporter.throughput.step(result.samples)
                clock.step()
                if result.skipped:
                    reporter.skipped(state, result)
                if trace := profiler.after(result.step):
                    reporter.log(f"profile: {trace}")
                if result.step % config.log_interval == 0 or result.step in (1, config.last_step):
                    reporter.step(state, result, watch.communication)
                else:
                    reporter.between(state, result)
            if spike is not None:
                steps.forget()  # drop steps enqueued after the spike
                checkpoint = _rewind(run, state, spike, reporter)
                saved, to_save = state.step, False
                continue
            if steps.waiting:  # the state is ahead of the results, so the code below must not use it
                continue
            if _due(state.step, config.replica_check_interval):
                from gptlite.monitor.replicas import check_replicas

                check_replicas(state.named_parameters(), state.tied_names(), mesh, state.step)
            if state.step == config.last_step:
                break  # evaluation and save follow below
            if _due(state.step, config.eval_interval) and not stopping.now:
                evaluation = _evaluate(state, config, reporter, stopping.poll) or evaluation
            to_save = to_save or _due(state.step, settings.checkpoint.interval)
            # Postpone a save while losses are above the band, as the checkpoint may be part of a spike.
            if to_save and not stopping.now and not (state.spikes and state.spikes.suspects):
                checkpoint, saved, to_save = _save(run, state, reporter, clock), state.step, False
        if trace := profiler.after(state.step, ending=True):
            reporter.log(f"profile: {trace}")
    if stopping.save_failed:
        run.finish_saves()  # raises
    ending = Ending.done
    if state.step == config.last_step and stopping.signal is None:
        evaluation = _evaluate(state, config, reporter, stopping.poll_signal) or evaluation
        ending = Ending.done if state.step == config.max_steps else Ending.stop_step
    elif stopping.signal is None:
        ending = Ending.max_time
    if checkpoint is None or saved != state.step:
        checkpoint = _save(run, state, reporter, clock)
    run.finish_saves()
    if stopping.signal is not None:
        ending = Ending.signal
    return Outcome(ending, evaluation, checkpoint, stopping.exit_code)


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _results(
    steps: Steps, begins: bool, pauses: Callable[[], bool], state: TrainState, reporter: Reporter, watch: Watch
) -> Iterator[StepResult | Spike]:
    """Begin a step if `begins`, and yield the results that must be processed: all if the run then `pauses` or ends.

    If `trainer.spike` handles spikes, a Spike is yielded in place of the result, and Diverged is not raised.
    """
    spikes = state.spikes
    try:
        if begins:
            with watch.step(state.step + 1):
                reporter.take(steps.begin, state)
        everything = not begins or pauses()
        while steps.ready(everything):
            with watch.step(state.step):
                result = steps.take()
            spike = None
            if spikes is not None and not result.skipped:  # the loss scale handles overflows
                spike = spikes.taken(result.step, result.begin, result.stop, result.loss)
            yield spike or result
    except Diverged as error:
        if spikes is None:
            raise
        state.optimizer.zero_grad(set_to_none=True)  # discard the gradients of the failed step
        begin = state.consumed_samples
        yield spikes.failed(state.step + 1, begin, state.loader.schedule.after(begin), error.what)


def _rewind(run: Saves, state: TrainState, spike: Spike, reporter: Reporter) -> Path:
    """Restore a checkpoint from before the spike, and skip its samples. Raises Spiked if that is not possible."""
    spikes = state.spikes
    assert spikes is not None
    rewinds, words = spikes.rewinds + 1, f"spike at step {spike.step}: {spike.why}"
    if rewinds > spikes.config.max_rewinds:
        raise Spiked(f"{words}; the run has already been rewound trainer.spike.max_rewinds={rewinds - 1} times")
    with reporter.throughput.excluded():
        checkpoint = run.rewind(state, spike)
    if checkpoint is None:
        raise Spiked(
            f"{words}; there is no checkpoint from before its samples, {spike.first:,} to {spike.stop - 1:,}; "
            "set a smaller checkpoint.interval, and checkpoint.keep=2 or more"
        )
    spikes.rewinds = rewinds  # restoring the checkpoint has reset the count
    reporter.rewound(state, spike, checkpoint)
    return checkpoint


def _save(run: Saves, state: TrainState, reporter: Reporter, clock: Clock) -> Path:
    start = time.monotonic()
    with reporter.throughput.excluded():
        path = run.save(state)
    clock.save_seconds = max(clock.save_seconds, time.monotonic() - start, run.save_seconds)
    return path


def _evaluate(
    state: TrainState, config: TrainerConfig, reporter: Reporter, interrupted: Callable[[], bool]
) -> Evaluation | None:
    """Evaluate and report. Returns None if interrupted, or if this step was already evaluated."""
    if state.evaluated_step == state.step:
        return None
    with reporter.throughput.excluded():
        result = evaluate_sets(state.model, state.runner, state.loader, config.eval_samples, interrupted, reporter.log)
    if result is not None:
        state.best_val_loss = min(state.best_val_loss, result.loss)
        state.evaluated_step = state.step
        reporter.evaluation(state, result)
    return result
