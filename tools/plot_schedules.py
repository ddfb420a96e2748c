"""Draw all learning-rate schedules into one picture, with the code that training uses.

python tools/plot_schedules.py [folder=docs/pictures]
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from gptlite.config.command_line import run_tool
from gptlite.errors import ConfigError
from gptlite.files import replacing
from gptlite.optimizer.schedule import Schedule
from gptlite.optimizer.schedule_config import (
    ConstantConfig,
    CosineConfig,
    InverseSqrtConfig,
    LinearConfig,
    ScheduleConfig,
    WarmupConfig,
    WSDConfig,
)

MAX_STEPS = 1000
COLORS = ("#1f5fbf", "#d9822b")
INK, MUTED, GRID, SHADE = "#1c1c1c", "#6b6b6b", "#e6e6e6", "#f1f4f9"


@dataclass
class Arguments:
    """Command-line arguments."""

    folder: str = "docs/pictures"


class Panel(NamedTuple):
    """One schedule: name, formula, configurations to draw, and labels if there are several curves."""

    name: str
    formula: str
    curves: tuple[ScheduleConfig, ...]
    labels: tuple[str, ...] = ()


LOGARITHM = r"$m + (1-m)\,\ln(s+1)\,/\,\ln W$, then $1$"
WARMUPS = (WarmupConfig(warmup_steps=None), WarmupConfig(warmup_steps=None, log=False))
PANELS = [
    Panel("cosine", r"$m + (1-m)\,\frac{1}{2}(1 + \cos\,\pi p)$", (CosineConfig(warmup_steps=None),)),
    Panel("linear", r"$1 - (1-m)\,p$", (LinearConfig(warmup_steps=None),)),
    Panel("wsd", r"$1$, then $1 - (1-m)\,p$ over the last half", (WSDConfig(warmup_steps=None),)),
    Panel("constant", r"$1$", (ConstantConfig(warmup_steps=None),)),
    Panel("inverse_sqrt", r"$\sqrt{(W+1)\,/\,(s+1)}$", (InverseSqrtConfig(warmup_steps=None),)),
    Panel("warmup", LOGARITHM, WARMUPS, ("log: true", "log: false")),
]


def draw(axes: Axes, panel: Panel) -> None:
    """Draw one panel: learning rate divided by its peak over the optimizer steps, with the warmup shaded."""
    schedules = [Schedule(config, MAX_STEPS) for config in panel.curves]
    for schedule, color in reversed(list(zip(schedules, COLORS, strict=False))):
        axes.plot([schedule.factor(step) for step in range(MAX_STEPS)], color=color, linewidth=2.2)
    for line, (label, color) in enumerate(zip(panel.labels, COLORS, strict=False)):
        axes.text(0.13 * MAX_STEPS, 0.86 - 0.1 * line, label, color=color)
    warmup = schedules[0].warmup_steps
    axes.axvspan(0, warmup, color=SHADE, zorder=0)
    axes.set_xticks([0, warmup, MAX_STEPS], ["0", "W", "D" if hasattr(panel.curves[0], "decay_steps") else "end"])
    axes.set_title(panel.name, loc="left", fontsize=12, fontweight="bold", color=INK, pad=24)
    axes.text(0, 1.045, panel.formula, transform=axes.transAxes, fontsize=10, color=MUTED)


def schedules() -> Figure:
    """Draw all panels."""
    figure = Figure(figsize=(11, 6.4), layout=ConstrainedLayoutEngine(wspace=0.06, hspace=0.1))
    for axes, panel in zip(figure.subplots(2, 3, sharey=True).flat, PANELS, strict=True):
        axes.set(xlim=(-0.01 * MAX_STEPS, 1.01 * MAX_STEPS), ylim=(0, 1.06), yticks=[0, 0.25, 0.5, 0.75, 1])
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.tick_params(colors=MUTED, length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(GRID)
        draw(axes, panel)
    letters = "(W: end of the warmup, D: end of the decay, m: min_ratio, p: progress of the decay)"
    figure.supylabel("rate / peak rate", fontsize=10, color=MUTED)
    figure.supxlabel(f"optimizer step s   {letters}", fontsize=10, color=MUTED)
    return figure


def save(draw: Callable[[], Figure], arguments: Arguments) -> None:
    """Draw a picture, write it atomically, and print its path. Raises ConfigError if it cannot be written."""
    path = Path(arguments.folder) / f"{draw.__name__}.png"
    figure = draw()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            figure.savefig(file, dpi=130, format="png")
    except OSError as error:
        raise ConfigError(f"folder={arguments.folder} cannot be written: {error}; give another path") from None
    print(f"wrote {path}")


if __name__ == "__main__":
    run_tool(partial(save, schedules), Arguments, __doc__)
