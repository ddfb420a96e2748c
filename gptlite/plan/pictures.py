"""A plan as pictures: where the time of each layout goes, what memory it takes, and the pipeline of the best."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

from gptlite.errors import ConfigError
from gptlite.files import replacing
from gptlite.metrics.plot import FAINT, INK, STYLE
from gptlite.plan.search import Candidate
from gptlite.plan.timeline import Timeline
from gptlite.plan.workload import RankBytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")
PARTS = {"compute": "#2460a7", "communication": "#d1602a", "bubble": "#d9dde3", "optimizer": "#6f9f58"}
MEMORY = {"parameters": "#2460a7", "gradients": "#6f9f58", "optimizer": "#e0b64c", "activations": "#d1602a"}
PASSES = {"F": "#2460a7", "B": "#6f9f58", "I": "#6f9f58", "W": "#e0b64c"}
PASS_WORDS = {"F": "forward", "B": "backward", "I": "backward: inputs", "W": "backward: weights"}
EQUAL = "#f1ead6"  # the span of the planner's error
NAME_WIDTH, TITLE_WIDTH = 44, 110  # signs
SHOWN_RANKS = 32  # of a pipeline; more are lines too thin to see


def _styled(draw: Callable[P, Path]) -> Callable[P, Path]:
    """Draws in the project's style, whichever objects are made on the way."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> Path:
        import matplotlib

        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return drawn


@_styled
def draw_plan(
    candidates: Sequence[Candidate],
    names: Sequence[str],
    limit: float,
    equal: float,
    title: str,
    notes: Sequence[str],
    out: Path,
) -> Path:
    """Bars of each layout's step, by part, and of its fullest rank's memory, with the limit in bytes. Returns `out`.

    Steps of up to `equal` seconds lie in the planner's error of the fastest; `notes` are lines below the bars.
    """
    figure = _figure(13, 2.8 + 0.48 * len(candidates))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.35, 1))
    rows = range(len(candidates))
    steps = [[getattr(each.prediction, f"{part}_seconds") for part in PARTS] for each in candidates]
    _bars(left, steps, PARTS)
    for row, each in enumerate(candidates):
        mfu = "" if each.prediction.mfu is None else f", MFU {each.prediction.mfu:.0%}"
        words = f" {each.prediction.tokens_per_second:,.0f} tok/s{mfu}"
        left.text(sum(steps[row]), row, words, va="center", fontsize=8, color=INK)
    left.axvspan(sum(steps[0]), equal, color=EQUAL, zorder=0)
    left.set_xlim(0, 1.32 * max(map(sum, steps)))
    left.set_yticks(list(rows), [textwrap.fill(name, NAME_WIDTH) for name in names], fontsize=8)
    left.tick_params(axis="y", labelcolor=INK)
    left.invert_yaxis()
    left.set_xlabel("seconds a step, predicted; shaded: equal to the first within the planner's error")
    memory = [[getattr(each.prediction.memory, part) / 2**30 for part in MEMORY] for each in candidates]
    _bars(right, memory, MEMORY)
    right.axvline(limit / 2**30, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    right.set_xlabel("GiB on the fullest rank; dashed: what there is")
    return _saved(figure, title, out, notes)


@_styled
def draw_largest(
    names: Sequence[str],
    layers: Sequence[int],
    words: Sequence[str],
    memory: Sequence[RankBytes],
    room: Sequence[float],
    title: str,
    out: Path,
) -> Path:
    """Bars of the most layers that fit in each layout, with `words` on each, and of its fullest rank's memory, with
    what there is in bytes. Returns `out`."""
    figure = _figure(13, 2.2 + 0.42 * len(names))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.35, 1))
    rows = range(len(names))
    left.barh(rows, layers, color=PARTS["compute"], height=0.66)
    for row in rows:
        left.text(layers[row], row, f" {words[row]}", va="center", fontsize=8, color=INK)
    left.set_xlim(0, 1.32 * max(layers))
    left.set_yticks(list(rows), [textwrap.fill(name, NAME_WIDTH) for name in names], fontsize=8)
    left.tick_params(axis="y", labelcolor=INK, length=0)
    left.grid(axis="y", visible=False)
    left.invert_yaxis()
    left.set_xlabel("layers, the most that fit")
    _bars(right, [[getattr(each, part) / 2**30 for part in MEMORY] for each in memory], MEMORY)
    for row in rows:
        right.plot([room[row] / 2**30] * 2, [row - 0.4, row + 0.4], color=INK, linewidth=1, linestyle=(0, (4, 3)))
    right.set_xlabel("GiB on the fullest rank, predicted; dashed: what there is")
    return _saved(figure, title, out)


@_styled
def draw_timeline(timeline: Timeline, title: str, out: Path) -> Path:
    """Each pipeline rank's passes over a step. Returns `out`."""
    shown = min(timeline.ranks, SHOWN_RANKS)
    figure = _figure(11, 1.5 + 0.3 * shown)
    axes = figure.subplots()
    for kind, color in PASSES.items():
        for rank in range(shown):
            spans = [(e.start, e.end - e.start) for e in timeline.of_rank(rank) if e.kind == kind]
            if spans:
                axes.broken_barh(spans, (rank - 0.4, 0.8), facecolor=color, edgecolor="white", linewidth=0.3)
    used = [kind for kind in PASSES if any(event.kind == kind for event in timeline.events)]
    handles = [axes.barh([0], [0], color=PASSES[kind], label=PASS_WORDS[kind]) for kind in used]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(used), frameon=False)
    axes.set_ylim(shown - 0.5, -0.5)
    axes.set_yticks(range(0, shown, max(1, shown // 16)))
    axes.set_ylabel("pipeline rank")
    axes.set_xlabel(f"seconds; the last rank waits {timeline.bubble(timeline.ranks - 1):.0%} of them")
    axes.grid(False)
    return _saved(figure, title, out)


def make_folder(folder: Path) -> None:
    """Where pictures go. Raises ConfigError where it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={folder}: {error}; give another folder") from None


def _bars(axes: Axes, rows: Sequence[Sequence[float]], colors: dict[str, str]) -> None:
    starts = [0.0] * len(rows)
    for index, (part, color) in enumerate(colors.items()):
        widths = [row[index] for row in rows]
        axes.barh(range(len(rows)), widths, left=starts, color=color, label=part, height=0.66)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(colors), frameon=False, fontsize=8, handlelength=1)
    axes.grid(axis="y", visible=False)
    axes.tick_params(length=0)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _saved(figure: Figure, title: str, out: Path, notes: Sequence[str] = ()) -> Path:
    with replacing(out) as file:
        figure.suptitle(textwrap.fill(title, TITLE_WIDTH), x=0.01, ha="left", fontsize=11, weight="bold", color=INK)
        if notes:
            figure.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=9, color=INK)
        for axes in figure.axes:
            axes.xaxis.label.set_color(FAINT)
        figure.savefig(file, format="png")
    return out
