"""Output of the training loop: metrics rows for the sinks and console lines, at log intervals and evaluations."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gptlite.metrics.console import EXPERT_LOADS, TRAIN_METRIC, VAL_METRIC, eval_line, step_line
from gptlite.metrics.meter import Throughput
from gptlite.metrics.sinks import Sink
from gptlite.trainer.eval import Evaluation
from gptlite.trainer.observers import Observer
from gptlite.trainer.spike import Spike
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import StepResult

QUIET_SECONDS = 10.0  # longest time between two console lines, unless a step takes longer
COMM = "comm_seconds_"  # prefix of the row keys of communication times, before the axis


class Reporter:
    """Writer of metrics rows and console lines. Only rank 0 has sinks and output; other ranks only measure.

    `epoch` is the number of samples in an epoch; None if rows have no epoch. `unit` is the unit of throughput. The
    `observers` add entries to rows of training.
    """

    def __init__(
        self,
        sinks: list[Sink],
        throughput: Throughput,
        max_steps: int,
        log: Callable[[str], None],
        unit: str = "tokens",
        epoch: int | None = None,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        self.sinks, self.throughput, self.observers = sinks, throughput, observers
        self.max_steps, self.log, self.unit, self.epoch = max_steps, log, unit, epoch
        self.speeds: list[float] = []  # tokens per second of each training row
        self.spikes: list[dict[str, int]] = []  # rewinds of this process: step and skipped samples
        self._last: dict[str, Any] = {}  # the last training row
        self._told = throughput.clock()  # time of the last console line of a step

    def step(
        self, state: TrainState, result: StepResult, communication: Callable[[float], dict[str, Any]] = lambda _: {}
    ) -> None:
        """Write a training row: the result, the throughput since the last row, and the entries of observers.

        `communication(step_seconds)` returns the row's communication times. The state may be one step ahead of
        `result`.
        """
        row: dict[str, Any] = {"step": result.step, "loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr}
        row |= {TRAIN_METRIC + name: mean for name, mean in result.metrics.items()}
        if result.loss_scale is not None and state.scaler is not None:
            row |= {"loss_scale": result.loss_scale, "skipped_steps": state.scaler.skipped}
        if result.experts is not None:
            row |= {EXPERT_LOADS: result.experts.tokens, "router_losses": result.experts.losses}
        row["tokens"] = result.tokens
        if self.epoch is not None:
            row["epoch"] = round(result.stop / self.epoch, 4)
        row |= self.throughput.read()
        for observer in self.observers:
            row |= observer.entries()  # may be collective, as is the next line
        row |= communication(row["step_seconds"])
        if row["tokens_per_second"] is not None:
            self.speeds.append(row["tokens_per_second"])
        self._last = row
        self._write(row)
        eta = self.throughput.eta_seconds(state.remaining_batches(self.max_steps))
        self.log(step_line(row, state.steps_until(self.max_steps), eta, self.unit))
        self._told = self.throughput.clock()

    def between(self, state: TrainState, result: StepResult) -> None:
        """Print the line of a step that has no row, if none has been printed for QUIET_SECONDS.

        The line has what this rank knows without the others, so that each rank may decide alone.
        """
        if self.throughput.clock() - self._told < QUIET_SECONDS:
            return
        row = {"step": result.step, "loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr}
        row |= {TRAIN_METRIC + name: mean for name, mean in result.metrics.items()}
        row["tokens_per_second"] = self.throughput.speed()
        eta = self.throughput.eta_seconds(state.remaining_batches(self.max_steps))
        self.log(step_line(row, state.steps_until(self.max_steps), eta, self.unit))
        self._told = self.throughput.clock()

    def skipped(self, state: TrainState, result: StepResult) -> None:
        """Log a step that was skipped due to an overflow."""
        assert state.scaler is not None
        after = state.scaler.scale
        change = f"is now {after:g}" if after != result.loss_scale else "is unchanged"
        self.log(f"step {result.step} is skipped: overflow at loss scale {result.loss_scale:g}, which {change}")

    def rewound(self, state: TrainState, spike: Spike, checkpoint: Path) -> None:
        """Write a row and a line on the rewind after a spike. Sinks discard rows of steps after `state.step`."""
        for sink in self.sinks:
            sink.rewind(state.step)
        skipped = {"skipped_from": spike.first, "skipped_to": spike.stop}
        self.spikes.append({"step": spike.step, **skipped})
        self._write({"step": state.step, "spike_step": spike.step, **skipped})
        self.log(
            f"spike at step {spike.step}: {spike.why}. Resuming from {checkpoint.name} without samples "
            f"{spike.first:,} to {spike.stop - 1:,}"
        )

    def evaluation(self, state: TrainState, result: Evaluation) -> None:
        """Write an evaluation row and line. For a blend, the row includes the loss of each data set."""
        row = {
            "step": state.step,
            "tokens": state.tokens,
            "val_loss": result.loss,
            "val_bits_per_byte": result.bits_per_byte,
        }
        row |= {f"val_loss/{name}": part.loss for name, part in result.parts.items()}
        row |= {f"val_bits_per_byte/{name}": part.bits_per_byte for name, part in result.parts.items()}
        row |= {VAL_METRIC + name: mean for name, mean in result.means.items()}
        self._write(row)
        self.log(eval_line(row, state.steps_until(self.max_steps), self.unit))

    def figures(self) -> dict[str, Any]:
        """Return the figures of result.json from training rows and observers; None for values that no row had.

        `tokens_per_second`, `step_seconds` and `mfu` are at the median speed. `comm_seconds` maps each axis to the
        communication time (see monitor/comm_time.py) of the last row, scaled to a step at the median speed. `loss`
        is from the last row.
        """
        speeds, last = sorted(self.speeds), self._last
        speed = speeds[len(speeds) // 2] if speeds else None
        seconds = self.throughput.tokens_per_step / speed if speed else None
        scale = seconds / last["step_seconds"] if seconds else 0.0  # from the last row to the median speed
        axes = [key.removeprefix(COMM) for key in last if key.startswith(COMM)]
        figures = {
            "loss": last.get("loss"),
            "tokens_per_second": speed,
            "step_seconds": seconds,
            "mfu": last["mfu"] / scale if seconds and last["mfu"] is not None else None,
            "comm_seconds": {axis: last[COMM + axis] * scale for axis in axes},
            "spikes": self.spikes,
        }
        for observer in self.observers:
            figures |= observer.figures()
        return figures

    def close(self, failed: bool = False) -> None:
        """Close every observer, then every sink. `failed` is True if the run raised an exception."""
        with ExitStack() as stack:
            for sink in reversed(self.sinks):
                stack.callback(sink.close, failed)
            for observer in reversed(self.observers):
                stack.callback(observer.close)

    def _write(self, row: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(row)
