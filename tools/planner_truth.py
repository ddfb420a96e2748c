"""Regenerate the table of docs/planner_memory.md: planned memory of layouts, compared with real ranks on this CPU.

python tools/planner_truth.py            # a few minutes; rewrites the table in place
"""

import sys
from pathlib import Path

from parallelism_table import replaced

ROOT = Path(__file__).parents[1]
SHOWN = 0.01  # layouts with at least this error get a row
DOCUMENT = ROOT / "docs" / "planner_memory.md"


def main() -> None:
    """Run the layouts and write their rows between the marks of the document."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    import torch

    torch.set_num_threads(1)  # as the ranks: oneDNN's memory depends on it
    from plan.truth_layouts import LAYOUTS
    from plan.truth_table import HEAD, worst_rows

    lines = []
    for row in worst_rows(LAYOUTS):
        print(row.line(), flush=True)
        if abs(row.error) >= SHOWN or row.mismatches():
            lines.append(row.line())
    lead = f"{len(LAYOUTS) - len(lines)} of {len(LAYOUTS)} layouts have an error below {SHOWN:.0%}. The others:\n"
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(replaced(text, "table", "\n".join([lead, HEAD, *lines])), encoding="utf-8")


if __name__ == "__main__":
    main()
