"""Prints each row's published and predicted throughput, or writes the page into the file that is given."""

import sys
from pathlib import Path

from plan.published.baseline import BASELINE
from plan.published.rows import deepspeed_rows, megatron_rows
from plan.published.unseen import unseen_rows

if __name__ == "__main__":
    if sys.argv[1:]:
        from plan.published.report import write

        write(Path(sys.argv[1]))
        sys.exit()
    print(f"{'run':28} {'published':>9} {'predicted':>9} {'error':>7} {'first':>7}")
    for row in (*megatron_rows(), *deepspeed_rows(), *unseen_rows()):
        figures = f"{row.published:>9.4g} {row.predicted():>9.4g} {row.error():+7.1%} {BASELINE[row.name]:+7.1%}"
        print(f"{row.name:28} {figures}  {row.unit}{'' if row.counted else ' (not counted)'}", flush=True)
