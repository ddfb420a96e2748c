"""Draw the batch and the noise scale of a run with data.batch_ramp=[first size, increment], and its validation losses
beside those of fixed batches, from the run folders.

python tools/plot_noise_ramp.py runs=outputs/noise_ramp [picture=docs/pictures/noise_ramp.png]
"""

from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from gptlite.config.command_line import run_tool
from gptlite.files import replacing
from gptlite.metrics.jsonl import read_rows

RUNS = {
    "small": ("batch 4", "#6b6b6b"),
    "large": ("batch 48", "#d9822b"),
    "ramp": ("batch 4 to 48, by the noise scale", "#1f5fbf"),
}
LENGTH = 64  # data.sequence_length


@dataclass
class Arguments:
    """Command-line arguments."""

    runs: str = "outputs/noise_ramp"  # folder with the runs small, large and ramp
    picture: str = "docs/pictures/noise_ramp.png"


def main(arguments: Arguments) -> None:
    """Draw the picture, and print the table of docs/adascale.md."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    batches, losses = figure.subplots(1, 2)
    for name, (label, color) in RUNS.items():
        rows = read_rows(Path(arguments.runs) / name / "metrics.jsonl")
        values = [(row["tokens"] / LENGTH, row["val_loss"]) for row in rows if "val_loss" in row]
        losses.plot(*zip(*values, strict=True), label=label, color=color)
        print(f"| {label} | {rows[-1]['step']:,} | {round(values[-1][0]):,} | {values[-1][1]:.3f} |")
        if name == "ramp":
            steps = [row for row in rows if row.get("noise_scale") is not None]
            numbers = [row["step"] for row in steps]
            batches.plot(numbers, [row["noise_scale"] for row in steps], label="noise scale", color="#6b6b6b")
            batches.step(numbers, [row["batch_size"] for row in steps], label="batch", color=color)
    batches.set(xlabel="optimizer steps", ylabel="samples", ylim=(0, 170))
    losses.set(xlabel="samples", ylabel="validation loss, nats per token", ylim=(5.0, 6.6))
    for axes in (batches, losses):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    with replacing(Path(arguments.picture)) as file:
        figure.savefig(file, dpi=120, format="png")


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
