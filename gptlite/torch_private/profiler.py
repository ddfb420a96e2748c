"""State of torch.profiler."""

from torch._C._autograd import _profiler_enabled as profiler_runs  # whether it is recording

__all__ = ("profiler_runs",)
