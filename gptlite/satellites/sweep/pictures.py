"""Charts of a sweep: speed and memory of each cell, losses, memory of each rank, pipeline timelines."""

from __future__ import annotations

import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gptlite.files import replacing
from gptlite.metrics.console import format_bytes, format_count
from gptlite.metrics.jsonl import read_rows
from gptlite.satellites.plan.pictures import MEMORY, TIME, draw_timeline
from gptlite.satellites.plots.style import INK, STYLE, label_log_ticks, short_tick
from gptlite.satellites.sweep.compare import ROUNDING, SPEED, Comparison, Row, bubble_share, schedule_words, timeline_of
from gptlite.satellites.sweep.folder import OK
from gptlite.satellites.sweep.table import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray[Any, np.dtype[np.float64]]
MOST_BARS, MOST_CURVES, MOST_TIMELINES = 40, 12, 8
DASH = 5  # line widths
SAME = 1e-9  # smaller differences of losses are drawn at this value, since the axis is logarithmic
DPI = 150
BLUE, PALE, GREY, ORANGE = TIME["compute"], "#a9c3e3", "#c3c8d0", TIME["communication"]
# Okabe and Ito's palette for colour-blind readers, without its yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#23272e")


class SweepPicture(NamedTuple):
    """PNG file in the sweep's folder, with its title and caption in sweep.html."""

    file: str
    title: str
    caption: str


def draw_all(
    folder: Path, comparison: Comparison, attempting: Callable[[str], AbstractContextManager[None]]
) -> list[SweepPicture]:
    """Draw all charts that have data into `folder`. `attempting` is a context for each chart, in case one fails."""
    import matplotlib
    from matplotlib.figure import Figure

    pictures = []
    plots = (
        ("throughput.png", "Speed and memory by layout", _throughput),
        ("losses.png", "Losses", _losses),
        ("memory.png", "Memory of each rank", _memory),
    )
    # Names must not be parsed as formulas. A local style and no pyplot, to change no global state.
    with matplotlib.rc_context({**STYLE, "text.parse_math": False}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters may be missing in the font
        for file, title, draw in plots:
            with attempting(file):
                figure = Figure(figsize=(11, 4.4), dpi=DPI, facecolor="white", layout="constrained")
                if caption := draw(figure, comparison, folder):
                    with replacing(folder / file) as out:
                        figure.savefig(out, format="png")
                    pictures.append(SweepPicture(file, title, caption))
        ran = [row for row in comparison.rows if row["pipeline"] and row["compute_seconds"]]
        # One timeline per schedule, from the first cell that has it.
        schedules = {schedule_words(row["pipeline"]): row for row in reversed(ran)}
        for schedule, row in sorted(schedules.items())[:MOST_TIMELINES]:
            file = f"timeline-{re.sub(r'[^a-z0-9]+', '-', schedule.lower())}.png"
            with attempting(file):
                if timeline := timeline_of(row["pipeline"], row["compute_seconds"]):
                    title = f"Timeline: {schedule}"
                    draw_timeline(timeline, f"{title}, bubble {bubble_share(timeline):.1%} of the step", folder / file)
                    derived = (
                        "Computed, not recorded. Passes are proportional to their FLOPs, scaled to the compute time"
                    )
                    words = f"measured in {row['name']}; messages take no time."
                    pictures.append(SweepPicture(file, title, f"{derived} {words}"))
    return pictures


def run_folder(row: Row, folder: Path) -> Path:
    """Return the cell's run folder, which need not exist. A relative path is relative to the sweep's folder if it
    exists there, else to the working directory."""
    inside = folder / row["run_dir"]
    return inside if inside.exists() else Path(row["run_dir"]).absolute()


def _throughput(figure: Figure, comparison: Comparison, folder: Path) -> str:
    """Draw bars of throughput and memory, in the order of the table. Cells without results show the reason."""
    rows = sorted(comparison.rows, key=lambda row: -(row[SPEED] or -1))[:MOST_BARS]
    rows.sort(key=lambda row: row["number"])
    if all(row[SPEED] is None for row in rows):
        return ""
    keys = ("step_seconds", "predicted_step_seconds", "memory_tensor_bytes", "memory_average_bytes")
    steps, planned_steps, tensors, average = (_values(rows, key) for key in keys)
    speed, memory = figure.subplots(1, 2, sharey=True)
    figure.set_figheight(1.4 + 0.3 * len(rows))
    places, names = range(len(rows)), [row["name"] for row in rows]
    kinds = ["best" if row["best"] else OK if row["status"] == OK else "not finished" for row in rows]
    speeds, peaks = _values(rows, SPEED), _values(rows, "memory_peak_bytes")
    for kind, color in {"best": BLUE, OK: PALE, "not finished": GREY}.items():
        widths = np.where(np.array(kinds) == kind, speeds, math.nan)
        speed.barh(places, widths, height=0.72, color=color, label=kind if any(widths > 0) else None)
    memory.barh(places, peaks, height=0.72, color=PALE, label="peak")
    memory.barh(places, tensors, height=0.36, color=BLUE, label="tensors")
    memory.plot(average, places, "|", color=ORANGE, markersize=12, markeredgewidth=2, label="average")
    planned = speeds * steps / np.where(planned_steps > 0, planned_steps, math.nan)
    for axes, ends in ((speed, planned), (memory, _values(rows, "predicted_memory_bytes"))):
        axes.plot(ends, places, "D", color=INK, markersize=4.5, markerfacecolor="white", label="predicted")
    _finish(
        speed, f"{comparison.unit} per second", names, np.fmax(speeds, planned), map(_speed_words, rows), format_count
    )
    words = ["" if math.isnan(peak) else format_bytes(peak) for peak in peaks]
    _finish(memory, "memory of the fullest rank", names, peaks, words, format_bytes)
    below: dict[str, Any] = {"ncols": 4, "frameon": False, "fontsize": 8}
    figure.legend(*speed.get_legend_handles_labels(), loc="outside lower left", **below)
    figure.legend(*memory.get_legend_handles_labels(), loc="outside lower right", **below)
    return (
        f"The fastest {MOST_BARS} cells at most, in the order of the table. Pale memory bars are the peak of the "
        "process (on a GPU: of the allocator), dark bars the tensors, and orange lines the average over the run. "
        "Diamonds are predictions of the speed, and of the tensors (the dark bars)."
    )


def _speed_words(row: Row) -> str:
    """Return the label of a cell's throughput bar, or the cell's status and reason without throughput."""
    if row[SPEED] is None:
        return textwrap.shorten(f"{row['status']}: {row['reason']}".removesuffix(": "), 60, placeholder=" ...")
    label = format_count(row[SPEED])
    if row["predicted_step_seconds"] and row["step_seconds"]:
        predicted = format_count(row[SPEED] * row["step_seconds"] / row["predicted_step_seconds"])
        label = f"measured {label}, predicted {predicted}"  # beside the mark of either
    label += "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
    label += "" if row["utilization"] is None else f", utilisation {row['utilization']:.0%}"
    return label + ("" if row["status"] == OK else f" ({row['status']})")


def _losses(figure: Figure, comparison: Comparison, folder: Path) -> str:
    """Draw all loss curves in one plot. A second plot shows validation losses if cells train different models, else
    each cell's distance from the baseline."""
    files = [(row, run_folder(row, folder) / "metrics.jsonl") for row in comparison.rows]
    runs = [(row, read_rows(path)) for row, path in files if path.is_file()]
    curves = [(row, curve, _curve(rows, "val_loss")) for row, rows in runs if (curve := _curve(rows, "loss"))]
    if not curves:
        return ""
    loss, apart = figure.subplots(1, 2)
    base_row, base, _ = next((each for each in curves if each[0]["baseline"]), curves[0])
    for index, (row, curve, held_out) in enumerate(curves):
        style: dict[str, Any] = {
            "color": COLORS[index % len(COLORS)] if index < MOST_CURVES else GREY,
            "linestyle": _dashes(*_place_among_equals(curve, [each for _, each, _ in curves[:MOST_CURVES]])),
            "marker": "o" if len(curve) == 1 else "",
        }
        label = shorten(row["name"], 30) if index < MOST_CURVES else None
        loss.plot(*zip(*curve.items(), strict=True), label=label, linewidth=1.6, **style)
        if comparison.axes and held_out:
            apart.plot(*zip(*held_out.items(), strict=True), **style | {"marker": "o"})
        elif not comparison.axes and curve is not base:
            common = [step for step in curve if step in base]
            apart.plot(
                common, [max(abs(curve[step] - base[step]), SAME) for step in common], **style | {"linestyle": "-"}
            )
    loss.set_title("loss, nats per token", loc="left", fontsize=10, weight="bold")
    title = "validation loss, nats per token" if comparison.axes else f"distance from {shorten(base_row['name'], 30)}"
    apart.set_title(title, loc="left", fontsize=10, weight="bold")
    if not comparison.axes:
        apart.set_yscale("log")
        label_log_ticks(apart.yaxis, short_tick)
    if not apart.lines:
        apart.set_axis_off()
    for axes in (loss, apart):
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    if comparison.axes:
        return f"Cells that differ in {' or '.join(comparison.axes)} train different models."
    same = "Every cell trains the same model, so the curves coincide up to rounding."
    if comparison.losses_apart > ROUNDING:
        same = f"Every cell trains the same model, but losses differ by {comparison.losses_apart:.1%}."
    return f"{same} Distances below {SAME:g} are drawn at that value."


def _place_among_equals(curve: dict[int, float], curves: Sequence[dict[int, float]]) -> tuple[int, int]:
    """Return a curve's place among those that cannot be told from it in a plot of all, and their number."""
    heights = [each[step] for each in curves for step in each]
    least = (max(heights) - min(heights)) / 200  # about the width of a line
    equal = [
        each
        for each in curves
        if (common := each.keys() & curve.keys()) and all(abs(each[step] - curve[step]) <= least for step in common)
    ]
    return next((place for place, each in enumerate(equal) if each is curve), 0), max(1, len(equal))


def _dashes(place: int, count: int) -> Any:
    """Return a line style in which curves that lie on each other take turns, so that each one is visible."""
    return "-" if count == 1 else (place * DASH, (DASH, DASH * (count - 1)))


def _memory(figure: Figure, comparison: Comparison, folder: Path) -> str:
    """Draw a stacked bar of categories for each rank, or with too many ranks for the fullest rank of each cell."""
    bars = [
        (f"{row['name']}  rank {rank}", sizes) for row in comparison.rows for rank, sizes in enumerate(row["ranks"])
    ]
    if len(bars) > MOST_BARS:
        bars = [(row["name"], row["fullest"]) for row in comparison.rows if row["ranks"]][:MOST_BARS]
    if not bars:
        return ""
    figure.set_figheight(1.4 + 0.3 * len(bars))
    axes, ends = figure.subplots(), np.zeros(len(bars))
    for category, color in MEMORY.items():
        widths = np.array([sizes.get(category, 0) for _, sizes in bars])
        axes.barh(range(len(bars)), widths, left=ends, height=0.82, label=category, color=color)
        ends = ends + widths
    names = [name for name, _ in bars]
    _finish(axes, "tensors of a training step", names, ends, map(format_bytes, ends), format_bytes)
    figure.legend(loc="outside lower center", frameon=False, ncols=4, fontsize=8)
    return (
        "Bytes of tensors in one step: the model state at its largest total, and the peak of activations and "
        f"temporary tensors. At most {MOST_BARS} bars."
    )


def _finish(
    axes: Axes, title: str, names: list[str], ends: Array, labels: Iterable[str], form: Callable[[float], str]
) -> None:
    """Add names and labels to horizontal bars, with the first bar on top.

    `labels` are placed at `ends`. `form` formats the ticks; with format_bytes they are in binary units.
    """
    from matplotlib.ticker import MultipleLocator

    # bar_label needs bars, and predictions may end beyond the visible ones.
    invisible = axes.barh(range(len(names)), np.nan_to_num(ends), alpha=0)
    axes.bar_label(invisible, list(labels), padding=7, fontsize=8)
    axes.set_yticks(range(len(names)), [shorten(name, 30) for name in names])
    axes.set_title(title, loc="left", fontsize=10, weight="bold", pad=7)
    axes.set_xlim(0, 1.45 * (axes.get_xlim()[1] or 1))  # space for the labels
    if form is format_bytes:
        axes.xaxis.set_major_locator(MultipleLocator(2.0 ** math.ceil(math.log2(axes.get_xlim()[1] / 5))))
    else:
        axes.locator_params(axis="x", nbins=5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.xaxis.set_major_formatter(lambda value, _: form(value) if value else "0")
    axes.tick_params(length=0)
    axes.grid(axis="y", visible=False)


def _values(rows: Sequence[Row], key: str) -> Array:
    return np.array([row[key] for row in rows], dtype=float)  # nan for None


def _curve(rows: Sequence[Row], key: str) -> dict[int, float]:
    """Return {step: loss} of the finite losses under `key`."""
    known = ((row["step"], row.get(key)) for row in rows)
    return {step: loss for step, loss in known if isinstance(loss, float) and math.isfinite(loss)}
