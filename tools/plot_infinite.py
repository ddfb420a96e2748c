"""Plot memory and step time by the place of model state.

python tools/plot_infinite.py [rows=docs/offload_measured.json] [output=docs/pictures/infinite.png]

`rows` is the file that `tools/bench_infinite.py place=all out=FILE` writes. Beside the time of a step, the plot has the
time in which the disk moves the bytes of the step.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptlite.config.command_line import run_tool
from gptlite.satellites.plots.style import INK, STYLE, TRAIN, VALIDATION

NAMES = {"infinite": "zero_infinity", "nvme": "offload=nvme", "cpu": "offload=cpu", "none": "no offload"}


@dataclass
class Arguments:
    """Command-line arguments."""

    rows: str = "docs/offload_measured.json"
    output: str = "docs/pictures/infinite.png"


def main(arguments: Arguments) -> None:
    """Read the rows and draw the plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows: list[dict[str, Any]] = json.loads(Path(arguments.rows).read_text())[::-1]
    places = [NAMES[row["place"]] for row in rows]
    with pyplot.rc_context(STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 2.6), sharey=True, layout="constrained")
        left.barh(places, [row["memory"] / 1e9 for row in rows], color=TRAIN)
        limit = max(row["limit_mib"] for row in rows) * 2**20 / 1e9
        left.axvline(limit, color=VALIDATION, label=f"limit, {limit:.2f} GB")
        left.set_xlabel("GB of memory above that at the start")
        right.barh(places, [row["step"] for row in rows], color=TRAIN, label="step")
        right.barh(places, [row["disk"] for row in rows], height=0.3, color=INK, label="the disk alone")
        right.set_xlabel("seconds")
        for axes in (left, right):
            axes.grid(axis="y", visible=False)
            axes.legend(frameon=False, loc="lower right" if axes is right else "upper right")
        figure.savefig(arguments.output, dpi=120)


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
