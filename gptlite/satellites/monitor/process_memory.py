"""Memory of this process on its device."""

import resource
import sys
from pathlib import Path

import torch


def memory_in_use(device: torch.device) -> dict[str, int | None]:
    """Return the row keys `memory_allocated_bytes` and `memory_peak_bytes`.

    On a GPU: bytes of live tensors, from the caching allocator. Measuring the memory of a step's phases, usually in the
    second step, resets the peak (memory_phases.py). On a CPU: the process's resident set, with the peak
    since the process started; None if the system does not report it.
    """
    if device.type == "cuda":
        allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    else:
        allocated, peak = resident_bytes()
    return {"memory_allocated_bytes": allocated, "memory_peak_bytes": peak}


def resident_bytes(status: Path = Path("/proc/self/status")) -> tuple[int | None, int]:
    """Return the current (None outside Linux) and peak resident set of this process, in bytes."""
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = usage if sys.platform == "darwin" else usage * 1024  # bytes on macOS, KiB on Linux
    try:
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    except OSError:
        return None, peak
    current = int(fields["VmRSS"].split()[0]) * 1024
    # ru_maxrss survives exec, so a process started by a large one would report its parent's peak.
    if "VmHWM" in fields:
        peak = int(fields["VmHWM"].split()[0]) * 1024
    return current, max(peak, current)
