"""The report's pictures, legible at 900 pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SIZE, DPI = (9.0, 4.2), 100
COLOURS = {
    "GEMM block": "#4477aa",
    "GEMM head": "#66ccee",
    "attention": "#228833",
    "dQKV copy": "#b0d9a0",
    "norm + residual": "#ccbb44",
    "GELU": "#ee8866",
    "bias sums": "#eedd88",
    "loss": "#aa3377",
    "copy/cast": "#999999",
    "optimizer": "#555555",
    "other": "#dddddd",
}
PLAIN = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"}  # behind a number on a line
DARK = ("GEMM block", "attention", "loss", "optimizer")
NARROWEST = 0.04  # of the axis: a narrower piece has no number on it


def stacked_classes(file: Path, title: str, bars: Mapping[str, Mapping[str, float]], goal: float | None) -> None:
    """A bar for each name, its classes beside one another in ns a token; `goal` is a line."""
    plot = _pyplot()
    figure, axes = plot.subplots(figsize=SIZE, dpi=DPI)
    names = list(bars)[::-1]
    most = max(sum(bar.values()) for bar in bars.values())
    left = [0.0] * len(names)
    for group, colour in COLOURS.items():
        widths = [bars[name].get(group, 0.0) for name in names]
        axes.barh(names, widths, left=left, color=colour, label=group, edgecolor="white", linewidth=0.6, height=0.6)
        for row, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width > NARROWEST * most:
                ink = "white" if group in DARK else "black"
                axes.text(start + width / 2, row, f"{width:.0f}", ha="center", va="center", fontsize=8, color=ink)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        place = total + 0.012 * most, row
        axes.text(*place, f"{total:,.0f}", va="center", fontsize=10, fontweight="bold", bbox=PLAIN, zorder=4)
    if goal is not None:
        axes.axvline(goal, color="black", linestyle="--", linewidth=1)
        axes.text(goal, len(names) - 0.56, f"goal {goal:,.0f}", fontsize=9, va="bottom", ha="center", bbox=PLAIN)
    axes.set_xlim(0, 1.1 * max(most, goal or 0.0))
    axes.set_ylim(-0.55, len(names) - 0.3)
    axes.set_xlabel("ns a token")
    axes.set_title(title, pad=14)
    axes.legend(ncols=6, fontsize=8, loc="upper center", bbox_to_anchor=(0.45, -0.16), frameon=False)
    _save(plot, figure, file)


def beside_floor(
    file: Path, title: str, groups: Sequence[str], measured: Sequence[float], floor: Sequence[float]
) -> None:
    """For each class the measured ns a token over the least possible."""
    plot = _pyplot()
    figure, axes = plot.subplots(figsize=SIZE, dpi=DPI)
    places = list(range(len(groups)))
    axes.barh([place + 0.2 for place in places], measured, height=0.38, color="#4477aa", label="measured")
    axes.barh([place - 0.2 for place in places], floor, height=0.38, color="#ccbb44", label="floor")
    most = max([*measured, *floor, 1e-9])
    for place, (its, least) in enumerate(zip(measured, floor, strict=True)):
        ratio = f"{its:.0f}   {its / least:.1f}x the floor" if least > 0.5 else f"{its:.0f}"
        axes.text(its + 0.01 * most, place + 0.2, ratio, va="center", fontsize=8)
    axes.set_yticks(places, groups)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * most)
    axes.set_xlabel("ns a token")
    axes.set_title(title)
    axes.legend(ncols=2, fontsize=8, loc="upper center", bbox_to_anchor=(0.45, -0.14), frameon=False)
    _save(plot, figure, file)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plot

    return plot


def _save(plot: Any, figure: Any, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file)
    plot.close(figure)
