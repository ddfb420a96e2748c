"""Prints each row's published and predicted throughput, or writes the page into the file that is given."""

import sys
from pathlib import Path

from plan.published.baseline import BASELINE
from plan.published.rows import deepspeed_rows, megatron_rows
from plan.published.stacks import fitted_rows
from plan.published.unseen import unseen_rows
from plan.published.world import checked, fitted_error

if __name__ == "__main__":
    if sys.argv[1:]:
        from plan.published.report import write

        write(Path(sys.argv[1]))
        sys.exit()
    print(f"{'run':60} {'published':>9} {'predicted':>9} {'error':>7} {'first':>7} {'fitted':>7}")
    stacks = [row for rows in (fitted_rows(), *checked().values()) for row in rows]
    for row in (*megatron_rows(), *deepspeed_rows(), *unseen_rows(), *stacks):
        first = f"{BASELINE[row.name]:+7.1%}" if row.name in BASELINE else f"{'':7}"
        fitted = f"{fitted_error(row):+7.1%}" if row.stack else f"{'':7}"
        figures = f"{row.published:>9.4g} {row.predicted():>9.4g} {row.error():+7.1%} {first} {fitted}"
        print(f"{row.name:60} {figures}  {row.unit}{'' if row.counted else ' (not counted)'}", flush=True)
