"""Chrome traces of selected training steps."""

from pathlib import Path
from typing import Any


class StepProfiler:
    """Profiler of steps first to last, numbered from 1. `steps` is [first, last], or empty to disable the profiler.

    The trace is `<folder>/trace-steps-<first>-<last>.json`. Ranks above 0 append `-rank-<rank>` to the name.
    """

    def __init__(self, steps: list[int], folder: Path, rank: int = 0) -> None:
        self.first, self.last = steps if steps else (0, 0)
        self._folder, self._rank = folder, f"-rank-{rank}" if rank else ""
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """Start the profiler if `step` is the first step to profile. Call before each step."""
        if self._profiler is None and self.first <= step <= self.last:
            from torch.profiler import profile

            self.first = step  # a resumed run may begin inside the window
            self._profiler = profile(record_shapes=True)
            self._profiler.start()

    def after(self, step: int, ending: bool = False) -> Path | None:
        """Write the trace after the last profiled step and return its path; None at other steps.

        Call after each step, and at the end of the run with `ending`, which writes a trace of the steps so far.
        """
        if self._profiler is None or (step < self.last and not ending):
            return None
        self._profiler.stop()
        path = self._folder / f"trace-steps-{self.first}-{step}{self._rank}.json"
        partial = path.with_suffix(".tmp")  # renamed when complete, so that a kill leaves no truncated trace
        partial.unlink(missing_ok=True)  # torch would write through a link
        self._profiler.export_chrome_trace(str(partial))
        partial.rename(path)
        self._profiler, self.last = None, 0
        return path

    def close(self) -> None:
        """Stop recording after a failed step. A profiler left running would crash the process at exit."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
