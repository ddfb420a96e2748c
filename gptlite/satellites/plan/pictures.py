"""Charts of a plan: step time of each layout by cause, memory of each layout, and the timeline of the best pipeline."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gptlite.errors import ConfigError
from gptlite.files import replacing
from gptlite.satellites.plan.capacity import GIB
from gptlite.satellites.plan.links import DENSE, ONEBIT, SPEEDS, LinkCurves
from gptlite.satellites.plan.search import ERROR
from gptlite.satellites.plan.timeline import Timeline
from gptlite.satellites.plan.workload import RankBytes
from gptlite.satellites.plots.style import FAINT, INK, STYLE, label_log_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Parts = Mapping[str, Sequence[float]]  # for each part of the bars, its length in each layout's bar
BLUE, GREEN, YELLOW, RED, GREY = "#2460a7", "#6f9f58", "#e0b64c", "#d1602a", "#d9dde3"
PURPLE, TEAL, BROWN = "#7b5aa6", "#43a3a8", "#8a6a50"
# A color means one thing in both charts of a picture: the optimizer, in time and in memory.
TIME = {"compute": BLUE, "communication": RED, "bubble": GREY, "optimizer": GREEN}
MEMORY = {"parameters": PURPLE, "gradients": TEAL, "optimizer": GREEN, "activations": YELLOW, "compression": BROWN}
PASSES = {
    "F": ("forward", BLUE),
    "B": ("backward", GREEN),
    "I": ("backward: inputs", GREEN),
    "W": ("backward: weights", YELLOW),
}
CURVES = (INK, PURPLE, BLUE, GREEN, BROWN, RED)
CURVE_NAMES = {DENSE: "dense fp32", "powersgd": "PowerSGD", ONEBIT: "1-bit Adam, after its warm-up"}
EQUAL = "#f1ead6"  # background of step times within the planner's error of the fastest
NAME_WIDTH, TITLE_WIDTH = 44, 110  # characters
SHOWN_RANKS = 32  # most pipeline ranks in a timeline; bars of more ranks are too thin to see
NUMBERED = 1 / 110  # share of a step; shorter passes are too narrow for the number of their micro-batch


@dataclass(frozen=True)
class Bars:
    """A layout's bars in the two charts of `draw_layouts`.

    Left: `lengths` by part, with `label` at the end. Right: memory of the fullest rank, with its limit in bytes.
    """

    name: str
    lengths: Mapping[str, float]
    label: str
    memory: RankBytes
    limit: float


def draw_layouts(
    out: Path,
    title: str,
    layouts: Sequence[Bars],
    label: str,
    shaded: tuple[float, float] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Draw two bar charts of layouts, lengths and memory, to the PNG file `out`.

    `label` is the axis label of the lengths, with their unit. `shaded` is a range of lengths to highlight. `notes` are
    lines of text below the charts.
    """
    with _picture(out, title, 13, 2.8 + 0.48 * len(layouts), notes) as figure:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.35, 1))
        lengths = {part: [each.lengths[part] for each in layouts] for part in layouts[0].lengths}
        totals = _bars(left, lengths, TIME, label)
        for row, each in enumerate(layouts):
            left.text(totals[row], row, f" {each.label}", va="center", fontsize=8, color=INK)
        if shaded:
            left.axvspan(*shaded, color=EQUAL, zorder=0)
        left.set_xlim(0, 1.32 * max(totals))
        left.set_yticks(range(len(layouts)), [textwrap.fill(each.name, NAME_WIDTH) for each in layouts], fontsize=8)
        left.tick_params(axis="y", labelcolor=INK)
        left.invert_yaxis()
        taken = {part: [getattr(each.memory, part) / GIB for each in layouts] for part in MEMORY}
        if not any(taken["compression"]):
            del taken["compression"]
        _bars(right, taken, MEMORY, "GiB on the fullest rank, predicted; dashed: the limit")
        # A step line, since layouts can have different limits.
        edges = [row - 0.5 for row in range(len(layouts) + 1)]
        limits, dashed = [each.limit / GIB for each in layouts], (0, (4, 3))
        right.stairs(limits, edges, orientation="horizontal", baseline=None, color=INK, linestyle=dashed)


def draw_timeline(timeline: Timeline, title: str, out: Path) -> None:
    """Draw each pipeline rank's passes over a step to the PNG file `out`."""
    shown = min(timeline.ranks, SHOWN_RANKS)
    with _picture(out, title, 11, 1.5 + 0.3 * shown) as figure:
        axes = figure.subplots()
        used = {event.kind for event in timeline.events}
        for kind, (name, color) in PASSES.items():
            label = name if kind in used else None
            for rank in range(shown):
                spans = [(each.start, each.end - each.start) for each in timeline.of_rank(rank) if each.kind == kind]
                axes.broken_barh(spans, (rank - 0.4, 0.8), color=color, edgecolor="white", linewidth=0.3, label=label)
                label = None  # one legend entry per kind
        for event in timeline.events:
            if event.rank < shown and event.end - event.start > NUMBERED * timeline.seconds:
                place = (event.start + event.end) / 2, event.rank
                axes.text(*place, str(event.micro_batch + 1), ha="center", va="center", fontsize=7, color="white")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(used), frameon=False)
        axes.set_xlim(left=0)
        axes.set_ylim(shown - 0.5, -0.5)
        axes.set_yticks(range(0, shown, max(1, shown // 16)))
        axes.set_ylabel("pipeline rank")
        axes.set_xlabel(f"seconds; the last rank is idle for {timeline.bubble(timeline.ranks - 1):.0%} of the step")
        axes.grid(False)


def draw_links(links: LinkCurves, title: str, out: Path) -> None:
    """Draw the step time by link speed, and its ratio to that of dense gradients, to the PNG file `out`. Points are
    measured."""
    with _picture(out, title, 9, 4.2) as figure:
        left, right = figure.subplots(1, 2)
        dense = dict(links.curves[DENSE].measured)
        for (name, curve), color in zip(links.curves.items(), CURVES[: len(links.curves)], strict=True):
            left.plot(SPEEDS, curve.seconds, color=color, label=CURVE_NAMES.get(name, name))
            right.plot(SPEEDS, links.gains(name), color=color)
            points = [point for point in curve.measured if point[0] in dense]
            left.plot(*zip(*points, strict=True), "o", color=color) if points else None
            ratios = [(speed, dense[speed] / seconds) for speed, seconds in points if name != DENSE]
            right.plot(*zip(*ratios, strict=True), "o", color=color) if ratios else None
        right.axhspan(1 - ERROR, 1 + ERROR, color=EQUAL, zorder=0)
        left.set_ylabel("seconds per step")
        right.set_ylabel("times as fast as dense fp32")
        left.set_xlabel("link between nodes" + "; points: measured" * any(c.measured for c in links.curves.values()))
        right.set_xlabel("link between nodes; shaded: the planner's error")
        for axes in (left, right):
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlim(SPEEDS[0], SPEEDS[-1])
            axes.set_xticks([0.01, 0.1, 1, 10, 100], ["10 Mb/s", "100 Mb/s", "1 Gb/s", "10 Gb/s", "100 Gb/s"])
            label_log_ticks(axes.yaxis, lambda value: f"{value:g}")
        left.legend(frameon=False)


def make_folder(folder: Path) -> None:
    """Create an output folder. Raises ConfigError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={folder}: cannot create the folder: {error}; give another folder") from None


def _bars(axes: Axes, lengths: Parts, colors: Mapping[str, str], label: str) -> list[float]:
    """Draw stacked bars, with a legend for more than one part, and return their total lengths."""
    ends = [0.0] * len(next(iter(lengths.values())))
    for part, widths in lengths.items():
        axes.barh(range(len(ends)), widths, left=ends, color=colors.get(part, BLUE), label=part, height=0.66)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    if len(lengths) > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(lengths), frameon=False, fontsize=8,
                    handlelength=1)  # fmt: skip
    axes.grid(axis="y", visible=False)
    axes.tick_params(length=0)
    axes.set_xlabel(label)
    return ends


@contextmanager
def _picture(out: Path, title: str, width: float, height: float, notes: Sequence[str] = ()) -> Iterator[Figure]:
    """Yield a figure in the project's style, and save it to the PNG file `out` at the end of the block."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE), replacing(out) as file:
        figure = Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")
        yield figure
        figure.suptitle(textwrap.fill(title, TITLE_WIDTH), x=0.01, ha="left", fontsize=11, weight="bold", color=INK)
        if notes:
            figure.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=9, color=INK)
        for axes in figure.axes:
            axes.xaxis.label.set_color(FAINT)
        figure.savefig(file, format="png")
