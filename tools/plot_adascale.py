"""Draw validation losses of runs by their optimizer steps, and AdaScale's gain, from the run folders.

python tools/plot_adascale.py runs=outputs/adascale [picture=docs/pictures/adascale.png]
"""

from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from gptlite.config.command_line import run_tool
from gptlite.files import replacing
from gptlite.metrics.jsonl import read_rows

RUNS = {
    "small": ("batch 2", "#6b6b6b"),
    "linear": ("batch 8, 4 x rate, a quarter of the steps", "#d9822b"),
    "adascale": ("batch 8, AdaScale", "#1f5fbf"),
}


@dataclass
class Arguments:
    """Command-line arguments."""

    runs: str = "outputs/adascale"  # folder with the runs small, linear and adascale
    picture: str = "docs/pictures/adascale.png"


def main(arguments: Arguments) -> None:
    """Draw the picture, and print the table of docs/adascale.md."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    losses, gains = figure.subplots(1, 2, width_ratios=(2, 1))
    for name, (label, color) in RUNS.items():
        rows = read_rows(Path(arguments.runs) / name / "metrics.jsonl")
        values = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
        losses.plot(*zip(*values, strict=True), label=label, color=color)
        print(f"| {label} | {values[-1][0]} | {values[-1][1]:.3f} |")
        if name == "adascale":
            steps = [(row["step"], row["gain"]) for row in rows if "gain" in row]
            gains.plot(*zip(*steps, strict=True), color=color)
    losses.set(xlabel="optimizer steps", ylabel="validation loss, nats per token", ylim=(5.2, 6.6))
    losses.legend(frameon=False)
    gains.set(xlabel="optimizer steps", ylabel="gain", ylim=(1, 4))
    for axes in (losses, gains):
        axes.grid(alpha=0.3)
    with replacing(Path(arguments.picture)) as file:
        figure.savefig(file, dpi=120, format="png")


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
