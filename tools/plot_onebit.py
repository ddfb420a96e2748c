"""Plot the losses of 1-bit optimizers above those of a dense run with the same data and rates.

python tools/plot_onebit.py dense=RUN runs=RUN,RUN [freeze=100] [output=docs/pictures/onebit.png]

RUN is a folder with metrics.jsonl. The plot has the training losses of all runs, and below the difference of each run
to the dense one, averaged over 50 steps. `freeze` is the last step of the warm-up. The means over the last 50 steps
are printed.
"""

from dataclasses import dataclass
from pathlib import Path

from gptlite.config.command_line import run_tool
from gptlite.metrics.jsonl import read_rows
from gptlite.satellites.plots.style import INK, STYLE, TRAIN, VALIDATION

OVER = 50  # steps of a mean


@dataclass
class Arguments:
    """Command-line arguments."""

    dense: str = ""
    runs: str = ""
    freeze: int = 100
    output: str = "docs/pictures/onebit.png"


def main(arguments: Arguments) -> None:
    """Read the runs, print their last means and draw the plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    dense = losses(arguments.dense)
    runs = {Path(run).name: losses(run) for run in arguments.runs.split(",")}
    with pyplot.rc_context(STYLE):
        figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
        above.plot(list(dense), list(dense.values()), color=INK, label=Path(arguments.dense).name)
        for (name, run), color in zip(runs.items(), (TRAIN, VALIDATION, "#5a9367"), strict=False):
            above.plot(list(run), list(run.values()), color=color, linewidth=0.9, label=name)
            apart = {
                step: 100 * (mean(run, step) / mean(dense, step) - 1) for step in run if step >= OVER and step in dense
            }
            below.plot(list(apart), list(apart.values()), color=color)
            means = f"{mean(run, max(run)):.4f}, dense {mean(dense, max(run)):.4f}"
            print(f"{name}: {means}, {list(apart.values())[-1]:+.2f}%")
        for axes in (above, below):
            axes.axvline(arguments.freeze, color=INK, linewidth=0.8, linestyle=":")
        above.set_ylabel("training loss")
        above.legend(frameon=False)
        below.set_ylabel(f"% above dense, mean of {OVER} steps")
        below.set_xlabel("step")
        figure.savefig(arguments.output, dpi=120)


def losses(run: str) -> dict[int, float]:
    """Return a run's training losses by step."""
    return {row["step"]: row["loss"] for row in read_rows(Path(run) / "metrics.jsonl") if "loss" in row}


def mean(run: dict[int, float], step: int) -> float:
    """Return the mean loss of the steps up to `step`."""
    values = [loss for each, loss in run.items() if step - OVER < each <= step]
    return sum(values) / len(values)


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
