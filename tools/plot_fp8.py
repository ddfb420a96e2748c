"""Draw training losses in fp8 beside bf16, and their differences, from run folders.

python tools/plot_fp8.py runs=outputs/fp8 [picture=docs/pictures/fp8_loss.png]
"""

from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from gptlite.config.command_line import run_tool
from gptlite.files import replacing
from gptlite.metrics.jsonl import read_rows

MODELS = {"modern": "gpt-lite-modern", "small": "GPT-3 Small"}
RUNS = {
    "bf16": ("bf16", "#6b6b6b"),
    "head": ("head in fp8", "#1f5fbf"),
    "fp8_head": ("blocks and head in fp8", "#d9822b"),
}
MEAN = 10  # logged steps of the mean that is drawn as the difference


@dataclass
class Arguments:
    """Command-line arguments."""

    runs: str = "outputs/fp8"  # folder with the runs MODEL_RUN, such as small_fp8_head
    picture: str = "docs/pictures/fp8_loss.png"


def main(arguments: Arguments) -> None:
    """Draw the picture, and print the table of docs/precision.md."""
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    for (model, title), (losses, differences) in zip(MODELS.items(), figure.subplots(2, 2), strict=True):
        curves = {name: losses_of(Path(arguments.runs) / f"{model}_{name}") for name in RUNS}
        for name, (label, color) in RUNS.items():
            losses.plot(list(curves[name]), list(curves[name].values()), label=label, color=color, linewidth=1)
            steps = [step for step in curves[name] if step in curves["bf16"]]
            gaps = [curves[name][step] - curves["bf16"][step] for step in steps]
            means = [sum(gaps[end - MEAN : end]) / MEAN for end in range(MEAN, len(gaps) + 1)]
            differences.plot(steps[MEAN - 1 :], means, label=label, color=color)
            loss = sum(curves[name][step] for step in steps[-MEAN:]) / MEAN
            print(f"| {title} | {label} | {steps[-1]:,} | {loss:.4f} | {means[-1]:+.4f} |")
        losses.set(xlabel="optimizer steps", ylabel="nats per token")
        losses.set_title(f"{title}: training loss", fontsize="medium")
        differences.set(xlabel="optimizer steps", ylabel="nats per token")
        differences.set_title(f"{title}: difference from bf16 (mean of {MEAN})", fontsize="medium")
        for axes in (losses, differences):
            axes.grid(alpha=0.3)
        losses.legend(frameon=False)
    with replacing(Path(arguments.picture)) as file:
        figure.savefig(file, dpi=120, format="png")


def losses_of(run: Path) -> dict[int, float]:
    """Return the training loss at each logged step of a run."""
    return {row["step"]: row["loss"] for row in read_rows(run / "metrics.jsonl") if "loss" in row}


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
