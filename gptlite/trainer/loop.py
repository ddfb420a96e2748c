"""The training loop: steps, with evaluation, checkpoints and stopping between them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from gptlite.checkpoint.config import CheckpointConfig
from gptlite.data.config import DataConfig
from gptlite.optimizer.config import OptimizerConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.trainer.config import TrainerConfig
from gptlite.trainer.eval import Evaluation, evaluate
from gptlite.trainer.profile import StepProfiler
from gptlite.trainer.report import Reporter
from gptlite.trainer.signals import StopSignal
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import train_step


class Ending(Enum):
    """Why a run ended. The values go into result.json."""

    done = "done"
    max_time = "stopped: trainer.max_time"
    signal = "stopped: signal"


@dataclass(frozen=True)
class Settings:
    """The sections of the configuration that the loop reads."""

    trainer: TrainerConfig
    data: DataConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig


@dataclass(frozen=True)
class Outcome:
    """How training ended, and its last evaluation and checkpoint."""

    ending: Ending
    evaluation: Evaluation | None
    checkpoint: Path


class Clock:
    """Whether there is time for another step before `trainer.max_time`, a save at its end included."""

    def __init__(self, minutes: float | None, started: float) -> None:
        self.deadline = None if minutes is None else started + 60 * minutes
        self.step_seconds = self.save_seconds = 0.0
        self._mark = time.monotonic()

    def over(self) -> bool:
        """To be called once a step: times it, and says whether the next step or a save could pass the deadline."""
        now = time.monotonic()
        self.step_seconds, self._mark = max(0.9 * self.step_seconds, now - self._mark), now
        return self.deadline is not None and now + 1.5 * self.step_seconds + 2 * self.save_seconds > self.deadline


def train(
    state: TrainState,
    mesh: Mesh,
    settings: Settings,
    reporter: Reporter,
    save: Callable[[], Path],
    stop: StopSignal,
    started: float,
    run_dir: Path,
) -> Outcome:
    """Trains until `trainer.max_steps`, a signal or `trainer.max_time`. Always ends with a checkpoint.

    `save` commits the state; `started` is when the process began, in time.monotonic() seconds.
    Raises Diverged where the loss or gradient is not finite; the checkpoints before it stay as they are.
    """
    config, accumulation = settings.trainer, accumulation_steps(settings.data, mesh)
    clock, profiler = Clock(config.max_time, started), StepProfiler(config.profile_steps, run_dir)
    evaluation, ending = None, Ending.done
    while state.step < config.max_steps:
        profiler.before(state.step + 1)
        result = train_step(state, accumulation, settings.optimizer.lr, settings.optimizer.clip_norm)
        reporter.throughput.step()
        if trace := profiler.after(state.step):
            reporter.log(f"profile: {trace}")
        if state.step % config.log_interval == 0 or state.step in (1, config.max_steps):
            reporter.step(state, result)
        if stop.received is not None or clock.over():
            ending = Ending.signal if stop.received is not None else Ending.max_time
            break
        if state.step == config.max_steps:
            break
        if _due(state.step, config.eval_interval):
            evaluation = _evaluate(state, config, reporter, stop) or evaluation
        if _due(state.step, settings.checkpoint.interval):
            _save(save, reporter, clock)
    if ending is Ending.done:
        evaluation = _evaluate(state, config, reporter, stop) or evaluation
    checkpoint = _save(save, reporter, clock)
    if stop.received is not None:
        ending = Ending.signal
    return Outcome(ending, evaluation, checkpoint)


def accumulation_steps(data: DataConfig, mesh: Mesh) -> int:
    """Micro-batches of each rank in a global batch."""
    return data.global_batch_size // (data.micro_batch_size * mesh.data_size)


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _save(save: Callable[[], Path], reporter: Reporter, clock: Clock) -> Path:
    start = time.monotonic()
    with reporter.aside():
        path = save()
    clock.save_seconds = max(clock.save_seconds, time.monotonic() - start)
    return path


def _evaluate(state: TrainState, config: TrainerConfig, reporter: Reporter, stop: StopSignal) -> Evaluation | None:
    (part,) = state.parts
    with reporter.aside():
        batches = state.loader.validation_batches(config.eval_samples)
        text_bytes = state.loader.validation_bytes(config.eval_samples)
        result = evaluate(part, batches, text_bytes, lambda: stop.received is not None)
    if result is not None:
        state.best_val_loss = min(state.best_val_loss, result.loss)
        reporter.evaluation(state, result)
    return result
