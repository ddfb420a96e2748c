"""A sweep's pictures: speed and memory of each layout, its losses, its ranks' memory, its pipelines' timelines."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlite.files import write_whole
from gptlite.metrics.console import format_bytes, format_count
from gptlite.metrics.jsonl import read_rows
from gptlite.metrics.plot import FAINT, INK, STYLE
from gptlite.sweep.judge import judge
from gptlite.sweep.report_rows import CATEGORIES, Row, number, run_folder
from gptlite.sweep.report_table import shorten
from gptlite.sweep.report_timeline import bubble_share, schedule_words, timeline_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS, MOST_RANK_BARS, MOST_CURVES, MOST_TIMELINES = 40, 48, 12, 8
MOST_POINTS = 2000  # of a curve
MOST_NUMBERED = 400  # passes that carry their micro-batch's number
DPI = 150
SAME = 1e-9  # a loss that differs by less is drawn as this
NAME_WIDTH = 30
ORANGE, BLUE, PALE, GREY = "#d1602a", "#2460a7", "#a9c3e3", "#c3c8d0"
# Okabe and Ito's colours, which the colour-blind can tell apart, without their yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#23272e")
OF_CATEGORY = dict(zip(CATEGORIES, ("#2460a7", "#d1602a", "#2a9d78", "#b9c2ce"), strict=True))
OF_PASS = {"F": "#2460a7", "B": "#d1602a", "I": "#e39a6f", "W": "#2a9d78"}
PASSES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}


@dataclass(frozen=True)
class Picture:
    """A PNG of the sweep's folder, and what the page says with it."""

    file: str
    title: str
    caption: str
    png: bytes


def draw_all(folder: Path, rows: Sequence[Row], log: Callable[[str], None]) -> list[Picture]:
    """Draws what the rows have figures for, into the folder. One that cannot be drawn is a line for `log`."""
    import matplotlib

    pipelines: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row.compute is None):  # one that has run gives the scale
        if row.pipeline:
            pipelines.setdefault(schedule_words(row.pipeline), row)
    kinds: list[tuple[str, Callable[[], Picture | None]]] = [
        ("speed and memory", lambda: _speed(rows)),
        ("losses", lambda: _losses(folder, rows)),
        ("memory of each rank", lambda: _memory(rows)),
        *((f"timeline of {words}", lambda words=words: _timeline(words, pipelines[words]))
          for words in sorted(pipelines)[:MOST_TIMELINES]),
    ]  # fmt: skip
    pictures = []
    for what, draw in kinds:
        try:
            # Nothing global is left behind: a style for these figures, and no pyplot.
            with matplotlib.rc_context(STYLE), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of letters that the font does not have
                picture = draw()
            if picture is not None:
                write_whole(folder / picture.file, picture.png)
                pictures.append(picture)
        except Exception as error:
            log(f"warning: sweep report: no picture of {what}: {type(error).__name__}: {error}")
    return pictures


def _speed(rows: Sequence[Row]) -> Picture | None:
    """Bars of tokens a second and of memory, the fastest first; cells without figures say why."""
    ran = sorted((row for row in rows if row.speed is not None), key=lambda row: -(row.speed or 0))
    if not ran:
        return None
    shown = [*ran, *(row for row in rows if row.speed is None)][:MOST_BARS]
    figure = _figure(1.3 + 0.34 * len(shown))
    speed, memory = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1))
    for at, row in enumerate(shown):
        if row.speed is None:
            speed.annotate(_plain(shorten(row.words, 60)), (0, at), (4, 0), textcoords="offset points", va="center",
                           fontsize=8, color=FAINT)  # fmt: skip
            continue
        words = format_count(row.speed) + ("" if row.mfu is None else f", MFU {row.mfu:.1%}")
        words += "" if row.utilization is None else f", {row.utilization:.0%} used"
        words += "" if row.ok else f" ({row.status})"
        planned = row.speed * row.step / row.predicted_step if row.step and row.predicted_step else None
        _bar(speed, at, row.speed, BLUE if row.is_best else PALE if row.ok else GREY, words, row.is_best, planned)
        peak, tensors = row.peak, row.tensors
        if peak is not None or tensors is not None:
            most = max(peak or 0, tensors or 0)
            _bar(memory, at, most, PALE, format_bytes(most), row.is_best, row.predicted_memory)
        if tensors is not None:
            memory.barh(at, tensors, height=0.36, color=BLUE)
        if row.average is not None:
            memory.plot([row.average] * 2, [at - 0.36, at + 0.36], color=ORANGE, linewidth=2, solid_capstyle="butt")
    for axes in (speed, memory):
        for line in axes.lines:
            label = "average" if line.get_color() == ORANGE else "predicted"
            if label not in {each.get_label() for each in axes.lines}:
                line.set_label(label)
        if axes.lines:
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=8)
    _head(speed, "tokens per second")
    _head(memory, "memory of the rank that has most")
    _names(speed, shown)
    _ticks(speed, format_count)
    _ticks(memory, format_bytes, binary=True)
    more = f" {len(rows) - len(shown)} more cells are in the table." if len(rows) > len(shown) else ""
    return _picture(figure, "throughput.png", "Speed and memory by layout",
                    "Fastest first. Memory: all that the process had at its peak (on a GPU: the allocator), and dark, "
                    "its tensors; the orange line is the average over the run. Used: the devices' utilisation. "
                    f"Diamonds: what was predicted.{more}")  # fmt: skip


def _losses(folder: Path, rows: Sequence[Row]) -> Picture | None:
    """The curves over each other; beside them the validation losses of cells that train different models, and of cells
    that train the same one how far each is from the baseline's."""
    axes_that_differ = judge(rows).axes
    curves = [(row, curve) for row in rows if (curve := _curve(run_folder(row, folder)))]
    if not curves:
        return None
    from matplotlib.ticker import MaxNLocator

    # The last curve lies on top and the first is the widest, so that equal ones all show.
    figure = _figure(4.4)
    loss, apart = figure.subplots(1, 2)
    base = next((curve for row, curve in curves if row.is_baseline), curves[0][1])
    base_name = next((row.name for row, _ in curves if row.is_baseline), curves[0][0].name)
    for index, (row, curve) in enumerate(curves):
        named = index < MOST_CURVES
        style: dict[str, Any] = {
            "color": COLORS[index % len(COLORS)] if named else GREY,
            "linestyle": ("-", "--", ":")[index // len(COLORS) % 3],
            "linewidth": max(1.1, 4.5 - 0.45 * index),
            "marker": "o" if len(curve) == 1 else "",
        }
        loss.plot(*_points(curve), label=_plain(shorten(row.name, NAME_WIDTH)) if named else None, **style)
        if axes_that_differ:
            held_out = _curve(run_folder(row, folder), "val_loss")
            if held_out:
                apart.plot(*_points(held_out), **style | {"linewidth": 1.4, "marker": "o", "markersize": 4})
            continue
        common = {step: max(abs(value - base[step]), SAME) for step, value in curve.items() if step in base}
        if curve is not base and common:
            apart.plot(*_points(common), **style | {"linewidth": 1.4})
    _head(loss, "loss", "nats per token")
    if axes_that_differ:
        _head(apart, "validation loss", "nats per token")
    else:
        _head(apart, "distance from the baseline", shorten(base_name, NAME_WIDTH))
        apart.set_yscale("log")
    for axes in (loss, apart):
        axes.set_xlabel("step")
        axes.tick_params(length=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if not apart.lines:
        apart.set_axis_off()
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    more = f" Grey: {len(curves) - MOST_CURVES} more." if len(curves) > MOST_CURVES else ""
    return _picture(figure, "losses.png", "Losses",
                    f"{_sameness(axes_that_differ)}{more}")  # fmt: skip


def _sameness(axes: Sequence[str]) -> str:
    if axes:
        return f"Cells that differ in {' or '.join(axes)} train different models."
    return (
        "Every cell trains the same model: the curves lie on each other, and differ by rounding. Distances below "
        f"{SAME:g} are drawn there."
    )


def _memory(rows: Sequence[Row]) -> Picture | None:
    """A bar for each rank, stacked by category."""
    known = [row for row in rows if row.ranks]
    if not known:
        return None
    every = sum(len(row.ranks) for row in known) <= MOST_RANK_BARS
    bars: list[tuple[float, str, dict[str, float]]] = []
    at = 0.0
    for row in known[:MOST_RANK_BARS]:
        ranks = list(enumerate(row.ranks))
        if not every:
            ranks = [max(ranks, key=lambda pair: sum(pair[1].values()))]
        for place, (rank, sizes) in enumerate(ranks):
            name = _plain(shorten(row.name, NAME_WIDTH))
            lone = len(row.ranks) == 1
            bars.append((at, name if lone else f"{name}  rank {rank}" if place == 0 else f"rank {rank}", sizes))
            at += 1
        at += 0.6 if every else 0
    figure = _figure(1.2 + 0.22 * at)
    axes = figure.subplots()
    starts = [0.0] * len(bars)
    for category in CATEGORIES:
        sizes = [each.get(category, 0.0) for _, _, each in bars]
        axes.barh([y for y, _, _ in bars], sizes, left=starts, height=0.82, label=category, color=OF_CATEGORY[category])
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    axes.set_yticks([y for y, _, _ in bars], [name for _, name, _ in bars])
    for (y, _, _), end in zip(bars, starts, strict=True):
        axes.annotate(format_bytes(end), (end, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
    _head(axes, "tensors of a training step", "by cell and rank")
    _ticks(axes, format_bytes, binary=True)
    _flip(axes, at)
    axes.margins(x=0.12)
    figure.legend(loc="outside lower center", frameon=False, ncols=4, fontsize=8)
    which = "" if every else " Of each cell, the rank that has most."
    more = f" The first {MOST_RANK_BARS} cells." if len(known) > MOST_RANK_BARS else ""
    return _picture(figure, "memory.png", "Memory of each rank",
                    "Bytes of tensors found in one step: each category when the model state is most, and the most that "
                    f"activations and temporary tensors took at one instant.{which}{more}")  # fmt: skip


def _timeline(words: str, row: Row) -> Picture | None:
    """Who computes what when in a step, by rank."""
    assert row.pipeline is not None
    found = timeline_of(row.pipeline, row.compute)
    if found is None or not found.events:
        return None
    ranks = 1 + max(event.rank for event in found.events)
    scaled = row.compute is not None and row.compute > 0
    unit = 1e3 if scaled else 1.0
    figure = _figure(1.4 + 0.42 * ranks)
    axes = figure.subplots()
    kinds = [kind for kind in PASSES if any(event.kind == kind for event in found.events)]
    for kind in kinds:
        for place in range(stages := row.pipeline.get("stages_per_rank") or 1):
            # A rank's later stages are paler.
            events = [event for event in found.events if event.kind == kind and event.stage // ranks == place]
            color, label = _paler(OF_PASS[kind], 0.45 * place / max(1, stages - 1)), None if place else PASSES[kind]
            axes.barh([e.rank for e in events], [unit * (e.end - e.start) for e in events],
                      left=[unit * e.start for e in events], height=0.84, color=color, edgecolor="white",
                      linewidth=0.6, label=label)  # fmt: skip
    if len(found.events) <= MOST_NUMBERED:
        for event in found.events:
            if event.end - event.start > found.seconds / 110:
                axes.text(unit * (event.start + event.end) / 2, event.rank, str(event.micro_batch + 1), ha="center",
                          va="center", fontsize=7, color=INK if event.stage >= ranks else "white")  # fmt: skip
    bubble = bubble_share(found) or 0.0
    _head(axes, words, f"bubble {bubble:.1%} of the step")
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_xlim(0, unit * found.seconds)
    axes.set_xlabel("milliseconds" if scaled else "time of a micro-batch in all stages")
    axes.tick_params(length=0)
    axes.grid(axis="y", visible=False)
    _flip(axes, ranks)
    figure.legend(loc="outside lower center", frameon=False, ncols=4, fontsize=8)
    name = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
    return _picture(figure, f"timeline-{name}.png", f"Timeline: {words}",
                    f"Derived, not recorded: passes in proportion to their FLOPs, messages free"
                    f"{f', scaled to the compute time measured in {row.name}' if scaled else ''}. Numbers are "
                    "micro-batches, paler passes those of a rank's later stages, and white is the bubble.")  # fmt: skip


def _figure(height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, height), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _picture(figure: Figure, file: str, title: str, caption: str) -> Picture:
    out = BytesIO()
    figure.savefig(out, format="png")
    return Picture(file, title, caption, out.getvalue())


def _bar(axes: Axes, at: int, value: float, color: str, words: str, strong: bool, planned: float | None) -> None:
    """A bar with words at its end, and a diamond where the plan saw the end."""
    axes.barh(at, value, height=0.72, color=color)
    if planned is not None:
        axes.plot(planned, at, "D", color=INK, markersize=4.5, markerfacecolor="white", linestyle="none", zorder=3)
    # Behind the diamond where it would lie on the words.
    axes.annotate(words, (max(value, planned or 0), at), (7, 0), textcoords="offset points", va="center", fontsize=8,
                  weight="bold" if strong else "normal")  # fmt: skip


def _head(axes: Axes, name: str, unit: str = "") -> None:
    axes.set_title(_plain(name), loc="left", fontsize=10, weight="bold", pad=7)
    if unit:
        axes.set_title(_plain(unit), loc="right", fontsize=9, color=FAINT, pad=7)


def _names(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set_yticks(range(len(rows)), [_plain(shorten(row.name, NAME_WIDTH)) for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(INK)
        label.set_fontweight("bold" if row.is_best else "normal")
    _flip(axes, len(rows))


def _flip(axes: Axes, count: float) -> None:
    axes.set_ylim(count - 0.4, -0.6)  # the first on top


def _ticks(axes: Axes, form: Callable[[float], str], binary: bool = False) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.tick_params(length=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.28 * (axes.get_xlim()[1] or 1))  # room for the words at the bars' ends
    unit = 1.0
    while binary and axes.get_xlim()[1] / unit > 1000:
        unit *= 1024
    axes.set_xticks([unit * tick for tick in MaxNLocator(5).tick_values(0, axes.get_xlim()[1] / unit)][:-1])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value) if value else "0"))


def _curve(run: Path, key: str = "loss") -> dict[int, float]:
    """Losses by step; empty without a file."""
    path = run / "metrics.jsonl"
    if not os.path.isfile(path):
        return {}
    return {row["step"]: loss for row in read_rows(path) if (loss := number(row.get(key))) is not None}


def _points(curve: dict[int, float]) -> tuple[list[int], list[float]]:
    """Steps and values, thinned."""
    steps = sorted(curve)[:: math.ceil(len(curve) / MOST_POINTS)]
    return steps, [curve[step] for step in steps]


def _paler(color: str, share: float) -> str:
    parts = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(part + share * (255 - part)):02x}" for part in parts)


def _plain(text: str) -> str:
    """Text in which matplotlib sees no formula, and no name of its own."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")
