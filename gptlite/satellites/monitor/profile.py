"""Chrome traces of selected training steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gptlite.trainer.observers import Observer
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import StepResult


class StepProfiler(Observer):
    """Profiler of steps first to last, numbered from 1. `steps` is [first, last], or empty to disable the profiler.

    The trace is `<folder>/trace-steps-<first>-<last>.json`. Ranks above 0 append `-rank-<rank>` to the name.
    `log(text)` is called with the path.
    """

    def __init__(self, steps: list[int], folder: Path, rank: int, log: Callable[[str], None]) -> None:
        self.first, self.last = steps if steps else (0, 0)
        self._folder, self._rank, self._log = folder, f"-rank-{rank}" if rank else "", log
        self._profiler: Any = None

    def before(self, state: TrainState) -> None:
        """Start the profiler before the first step to profile."""
        step = state.step + 1
        if self._profiler is None and self.first <= step <= self.last:
            from torch.profiler import profile

            self.first = step  # a resumed run may begin inside the window
            self._profiler = profile(record_shapes=True)
            self._profiler.start()

    def after(self, result: StepResult) -> None:
        """Write the trace after the last profiled step."""
        if self._profiler is not None and result.step >= self.last:
            self._write(result.step)

    def reads(self, state: TrainState) -> bool:
        """Return True after the last profiled step."""
        return state.step == self.last

    def ended(self, state: TrainState) -> None:
        """Write a trace of the steps so far if the run ended among the profiled steps."""
        if self._profiler is not None:
            self._write(state.step)

    def close(self) -> None:
        """Stop recording after a failed step. A profiler left running would crash the process at exit."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write(self, step: int) -> None:
        self._profiler.stop()
        path = self._folder / f"trace-steps-{self.first}-{step}{self._rank}.json"
        partial = path.with_suffix(".tmp")  # renamed when complete, so that a kill leaves no truncated trace
        partial.unlink(missing_ok=True)  # torch would write through a link
        self._profiler.export_chrome_trace(str(partial))
        partial.rename(path)
        self._profiler, self.last = None, 0
        self._log(f"profile: {path}")
