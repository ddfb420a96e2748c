"""Charts of the report, legible at a width of 900 pixels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {
    "GEMM block": "#4477aa",
    "GEMM head": "#66ccee",
    "attention": "#228833",
    "dQKV copy": "#b0d9a0",
    "norm + residual": "#ccbb44",
    "activation": "#ee8866",
    "bias sums": "#eedd88",
    "loss": "#aa3377",
    "copy/cast": "#999999",
    "optimizer": "#555555",
    "other": "#dddddd",
}
PLAIN = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"}  # behind a number on a line
# Classes whose colour needs white numbers.
DARK = ("GEMM block", "attention", "loss", "optimizer")
NARROWEST = 0.04  # share of the longest bar below which a segment has no number


def stacked_classes(file: Path, title: str, bars: Mapping[str, Mapping[str, float]], goal: float | None) -> None:
    """Draw each of `bars` (ns per token by class) as a stacked bar, and a line at `goal`."""
    figure = Figure(figsize=(9.0, 4.2), dpi=100)
    axes, names = figure.subplots(), list(bars)[::-1]
    most = max(sum(bar.values()) for bar in bars.values())
    left = [0.0] * len(names)
    for group, colour in COLOURS.items():
        widths = [bars[name].get(group, 0.0) for name in names]
        drawn = axes.barh(names, widths, left=left, color=colour, label=group, edgecolor="white", linewidth=0.6)
        numbers = [f"{width:.0f}" if width > NARROWEST * most else "" for width in widths]
        ink = "white" if group in DARK else "black"
        axes.bar_label(drawn, numbers, label_type="center", fontsize=8, color=ink)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        place = total + 0.012 * most, row
        axes.text(*place, f"{total:,.0f}", va="center", fontsize=10, fontweight="bold", bbox=PLAIN, zorder=4)
    if goal is not None:
        axes.axvline(goal, color="black", linestyle="--", linewidth=1)
        axes.text(goal, len(names) - 0.56, f"goal {goal:,.0f}", fontsize=9, va="bottom", ha="center", bbox=PLAIN)
    axes.set_xlim(0, 1.1 * max(most, goal or 0.0))
    axes.set_ylim(-0.55, len(names) - 0.3)
    _save(axes, title, file, columns=6)


def beside_floor(file: Path, title: str, measured: Mapping[str, float], floor: Mapping[str, float]) -> None:
    """Draw, for each class, the measured ns per token above the lower bound `floor`."""
    axes = Figure(figsize=(9.0, 4.2), dpi=100).subplots()
    drawn = axes.barh([row - 0.2 for row in range(len(measured))], list(measured.values()), 0.38, color="#4477aa")
    axes.barh([row + 0.2 for row in range(len(floor))], list(floor.values()), 0.38, color="#ccbb44", label="floor")
    drawn.set_label("measured")
    labels = [
        f"{ns:.0f}   {ns / floor[name]:.1f}x the floor" if floor[name] > 0.5 else f"{ns:.0f}"
        for name, ns in measured.items()
    ]
    axes.bar_label(drawn, labels, padding=4, fontsize=8)
    axes.set_yticks(range(len(measured)), list(measured))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max([*measured.values(), *floor.values(), 1e-9]))
    _save(axes, title, file, columns=2)


def speeds(file: Path, title: str, groups: Mapping[str, Mapping[str, float]]) -> None:
    """Draw the speeds of each group (ratios by name) as bars, one colour for each name, and a line at 1."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    count = sum(len(group) + 1 for group in groups.values())
    axes = Figure(figsize=(9.0, 1.6 + 0.24 * count), dpi=100).subplots()
    colours, row, middles = list(COLOURS.values()), 0, []
    for group in groups.values():
        middles.append(row + (len(group) - 1) / 2)
        for name, ratio in group.items():
            drawn = axes.barh(row, ratio, 0.85, color=colours[names.index(name) % len(colours)])
            axes.bar_label(drawn, [f"{ratio:.2f}  {name}"], padding=4, fontsize=8)
            row += 1
        row += 1
    axes.set_yticks(middles, list(groups))
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
    axes.set_xlim(0, 1.45 * max(ratio for group in groups.values() for ratio in group.values()))
    axes.set_xlabel("relative speed")
    axes.set_title(title)
    axes.figure.tight_layout()  # type: ignore[union-attr]
    axes.figure.savefig(file)  # type: ignore[union-attr]


def _save(axes: Axes, title: str, file: Path, columns: int) -> None:
    axes.set_xlabel("ns per token")
    axes.set_title(title, pad=14)
    axes.legend(ncols=columns, fontsize=8, loc="upper center", bbox_to_anchor=(0.45, -0.16), frameon=False)
    axes.figure.tight_layout()  # type: ignore[union-attr]
    axes.figure.savefig(file)  # type: ignore[union-attr]
