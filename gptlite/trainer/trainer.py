"""Training of a run: optimizer steps, with evaluations, checkpoints and stop checks in between."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from gptlite.checkpoint.config import CheckpointConfig
from gptlite.config.trainer import TrainerConfig
from gptlite.optimizer.config import OptimizerConfig
from gptlite.parallelism.pipeline import OnePart, Pipeline
from gptlite.trainer.eval import Evaluation, evaluate_sets
from gptlite.trainer.observers import Watch, due
from gptlite.trainer.report import Reporter
from gptlite.trainer.signals import Clock, Stopping, StopSignal
from gptlite.trainer.spike import Spike, Spiked
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Diverged, Execute, Step
from gptlite.trainer.steps import Steps, lag_of

SLOW_DISK = 200e6  # bytes per second, for an estimate of the duration of the first save


class Ending(Enum):
    """Reason why a run ended. The values are written to result.json."""

    done = "done"
    stop_step = "stopped: trainer.stop_step"
    max_time = "stopped: trainer.max_time"
    signal = "stopped: signal"


@dataclass(frozen=True)
class Settings:
    """Configuration sections used in training."""

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


@dataclass(frozen=True)
class Surroundings:
    """Parts of a run around its training: reporter, folder, stop signals, and the watch over its ranks.

    `started` is the start of the process, in time.monotonic() seconds. `execute` is the Step's.
    """

    reporter: Reporter
    folder: Saves
    stop: StopSignal
    watch: Watch
    started: float
    execute: Execute | None = None


class Trainer:
    """Training of a state to its last step.

    With a `lag` of 1, the default on a GPU, a step's result is processed after the next step has begun, but before any
    other use of the state.
    """

    def __init__(
        self,
        state: TrainState,
        passes: OnePart | Pipeline,
        settings: Settings,
        around: Surroundings,
        lag: int | None = None,
    ) -> None:
        config, optimizer, mesh = settings.trainer, settings.optimizer, state.runner.mesh
        self._state, self._config, self._save_interval = state, config, settings.checkpoint.interval
        self._reporter, self._folder, self._watch = around.reporter, around.folder, around.watch
        lag = lag_of(state.optimizer, mesh.device, lag, state.scaler)
        self._clock = Clock(config.max_time, around.started, state.num_bytes() / SLOW_DISK, lag)
        self._stopping = Stopping(mesh, around.stop, self._clock.over, lambda: self._folder.save_failed)
        self._steps = Steps(Step(mesh, passes, optimizer.lr, optimizer.clip_norm, self._stopping, around.execute), lag)
        self._observers = self._reporter.observers
        self._evaluation: Evaluation | None = None
        self._checkpoint: Path | None = None
        self._saved_step, self._save_due = -1, False

    def run(self) -> Outcome:
        """Train until `trainer.max_steps`, `trainer.stop_step`, a signal or `trainer.max_time`, and save a checkpoint.

        Raises Diverged for a non-finite loss or gradient, Spiked for a spike after which the run cannot rewind, an
        observer's exception, and the exception of a failed save. For a background save, this exception is raised at
        the next step. Earlier checkpoints are kept.
        """
        state, stopping = self._state, self._stopping
        # If the run stopped before an evaluation that was due, evaluate now, as the uninterrupted run would have.
        if due(state.step, self._config.eval_interval) and state.clock < self._config.last_step:
            self._evaluate(stopping.poll)
        while (begins := self._begins()) or self._steps.waiting:
            if (spike := self._advance(begins)) is not None:
                self._rewind(spike)
            elif not self._steps.waiting:  # else the state is ahead of the results and must not be used
                for observer in self._observers:
                    observer.settled(state)
                if state.clock < self._config.last_step:
                    self._evaluate_and_save()
        for observer in self._observers:
            observer.ended(state)
        if stopping.save_failed:
            self._folder.finish_saves()  # raises
        ending = self._ending()
        if self._saved_step != state.step:
            self._save()
        self._folder.finish_saves()
        assert self._checkpoint is not None
        return Outcome(
            ending if stopping.signal is None else Ending.signal, self._evaluation, self._checkpoint, stopping.exit_code
        )

    def _begins(self) -> bool:
        """Return True if another step begins."""
        return self._state.clock < self._config.last_step and not self._stopping.now

    def _advance(self, begins: bool) -> Spike | None:
        """Begin a step if `begins`, and process the results that must be read before the next one.

        Returns a spike that `trainer.spike` handles, instead of raising Diverged or processing its result.
        """
        state = self._state
        self._clock.mark()  # excludes evaluations and saves from the duration of a step
        try:
            if begins:
                with ExitStack() as stack:
                    for observer in self._observers:
                        observer.before(state)
                    stack.enter_context(self._watch.step(state.step + 1))
                    for observer in self._observers:
                        stack.enter_context(observer.during(state))
                    self._steps.begin(state)
            everything = not begins or self._reads()
            while self._steps.ready(everything):
                if (spike := self._process()) is not None:
                    return spike
        except Diverged as error:
            if state.spikes is None:
                raise
            state.optimizer.zero_grad(set_to_none=True)  # discard the gradients of the failed step
            begin = state.consumed_samples
            return state.spikes.failed(state.step + 1, begin, state.loader.schedule.after(begin), error.what)
        return None

    def _process(self) -> Spike | None:
        """Read the next result, and report it unless it is a spike."""
        state, reporter = self._state, self._reporter
        with self._watch.step(state.step):
            result = self._steps.take()
        if state.spikes is not None and not result.skipped:  # the loss scale handles overflows
            spike = state.spikes.taken(result.step, result.begin, result.stop, result.loss)
            if spike is not None:
                return spike
        reporter.throughput.step(result.samples)
        self._clock.step()
        if result.skipped:
            reporter.skipped(state, result)
        for observer in self._observers:
            observer.after(result)
        last = result.step + state.gained >= self._config.last_step
        if result.step % self._config.log_interval == 0 or result.step == 1 or last:
            reporter.step(state, result, self._watch.communication)
        else:
            reporter.between(state, result)
        return None

    def _reads(self) -> bool:
        """Return True if anything reads the state before the next step, so that all results must be read first."""
        step, intervals = self._state.step, (self._config.eval_interval, self._save_interval)
        ends = self._save_due or self._state.clock >= self._config.last_step
        waits = any(observer.reads(self._state) for observer in self._observers)
        return ends or waits or any(due(step, interval) for interval in intervals)

    def _evaluate_and_save(self) -> None:
        """Evaluate and save if due, between two steps."""
        state, stopping = self._state, self._stopping
        if due(state.step, self._config.eval_interval) and not stopping.now:
            self._evaluate(stopping.poll)
        self._save_due = self._save_due or due(state.step, self._save_interval)
        # Postpone a save while losses are above the band, as the checkpoint may be part of a spike.
        if self._save_due and not stopping.now and not (state.spikes and state.spikes.suspects):
            self._save()

    def _ending(self) -> Ending:
        """Return why the steps ended, after the last evaluation if the last step was taken."""
        state, config = self._state, self._config
        if state.clock < config.last_step:
            return Ending.max_time
        if self._stopping.signal is None:
            self._evaluate(self._stopping.poll_signal)
        return Ending.done if state.clock >= config.max_steps else Ending.stop_step

    def _save(self) -> None:
        start = time.monotonic()
        with self._reporter.throughput.excluded("checkpoints"):
            self._checkpoint = self._folder.save(self._state)
        self._saved_step, self._save_due = self._state.step, False
        seconds = time.monotonic() - start
        self._clock.save_seconds = max(self._clock.save_seconds, seconds, self._folder.save_seconds)

    def _evaluate(self, interrupted: Callable[[], bool]) -> None:
        """Evaluate and report, unless interrupted, or if this step was already evaluated."""
        state, reporter, samples = self._state, self._reporter, self._config.eval_samples
        if state.evaluated_step == state.step:
            return
        with reporter.throughput.excluded("evaluation"):
            state.settle()
            result = evaluate_sets(state.model, state.runner, state.loader, samples, interrupted, reporter.log)
        if result is not None:
            self._evaluation = result
            state.best_val_loss = min(state.best_val_loss, result.loss)
            state.evaluated_step = state.step
            reporter.evaluation(state, result)

    def _rewind(self, spike: Spike) -> None:
        """Restore a checkpoint from before the spike, and skip its samples. Raises Spiked if that is not possible."""
        self._steps.forget()  # drop steps that began after the spike
        state, spikes = self._state, self._state.spikes
        assert spikes is not None
        rewinds, message = spikes.rewinds + 1, f"spike at step {spike.step}: {spike.why}"
        if rewinds > spikes.config.max_rewinds:
            raise Spiked(f"{message}; the run has already been rewound trainer.spike.max_rewinds={rewinds - 1} times")
        with self._reporter.throughput.excluded():
            self._checkpoint = self._folder.rewind(state, spike)
        if self._checkpoint is None:
            raise Spiked(
                f"{message}; there is no checkpoint from before its samples, {spike.first:,} to {spike.stop - 1:,}; "
                "set a smaller checkpoint.interval, and checkpoint.keep=2 or more"
            )
        spikes.rewinds = rewinds  # restoring the checkpoint has reset the count
        self._saved_step, self._save_due = state.step, False
        self._reporter.rewound(state, spike, self._checkpoint)
