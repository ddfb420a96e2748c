"""Print the faults that `run` would plant, without running anything.

python tools/faults.py list [count=200] [seed=1] [areas=NAME,...]
"""

from __future__ import annotations

from dataclasses import dataclass

from fault_trials.run import Options as RunOptions
from fault_trials.run import chosen
from fault_trials.session import ROOT


@dataclass
class Options:
    """Command-line options."""

    count: int = 200
    seed: int = 1
    areas: str | None = None


def run(options: Options) -> int:
    """Print the faults. Raises ConfigError."""
    pending, wanted = chosen(ROOT, RunOptions(count=options.count, seed=options.seed, areas=options.areas))
    for area, faults in pending.items():
        print(f"\n{area}: {wanted[area]} of {len(faults)} drawn")
        for fault in faults[: wanted[area]]:
            print(f"{fault.file}:{fault.line} [{fault.operator}] {fault.old} -> {fault.new}")
    return 0
