"""Collectives that a rank waits for: torch's flight recorder of collectives, and names in the stack of a thread."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch._C._distributed_c10d as c10d

# Files and functions that tell, on a thread's stack, what the thread does.
DISTRIBUTED = f"{Path(torch.__file__).parent}/distributed/"
COLLECTIVES = (f"{DISTRIBUTED}distributed_c10d.py", f"{DISTRIBUTED}_functional_collectives.py")
BACKWARD = "_engine_run_backward"  # function of every backward pass


def collectives_started(groups: Sequence[Any]) -> tuple[int, ...]:
    """Return the number of collectives that each group has started on this rank. A change shows that the rank makes
    progress."""
    return tuple(group._get_sequence_number_for_group() for group in groups)


def time_collectives(group: Any) -> None:
    """Let the flight recorder measure how long a group's collectives take."""
    group._enable_collectives_timing()


def recorded_collectives(active: bool) -> list[dict[str, Any]]:
    """Return the flight recorder's collectives in start order: those in progress, or all that are in its buffer."""
    entries: list[dict[str, Any]] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # GPU (only in CUDA builds) and CPU
        if dump := getattr(c10d, name, None):
            # The first argument includes collectives, the second drops finished ones.
            entries += json.loads(dump(True, active)).get("entries", [])
    return entries
