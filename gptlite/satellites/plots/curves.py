"""Plot of a run: loss, learning rate, gradient norm, throughput and a model's own metrics over the steps of a
metrics.jsonl."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlite.errors import ConfigError, printable
from gptlite.files import replacing
from gptlite.metrics.console import TRAIN_METRIC, VAL_METRIC, format_count, format_duration
from gptlite.metrics.jsonl import read_rows
from gptlite.satellites.plots.style import FAINT, INK, STYLE, TRAIN, VALIDATION, short_tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

LEFT = 0.045  # left edge of the titles and the loss panel, as a fraction of the figure
LABEL_HEIGHT = 28  # points: two lines of text and some space
SHORT = 10  # maximum length of a series whose points are marked

Series = tuple[list[int], list[float]]


def plot_curves(jsonl: Path, out: Path) -> Path:
    """Plot the run in `jsonl` to the PNG `out`, whose folder must exist. Returns `out`.

    Raises:
        ConfigError: the file is missing or has no training loss.
    """
    rows = read_rows(jsonl) if jsonl.exists() else []
    train, validation = _series(rows, "loss"), _series(rows, "val_loss")
    if not train[0]:
        raise ConfigError(
            f"{jsonl} has no rows with a loss to plot; give the metrics.jsonl of a run that has logged a step"
        )

    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Figure instead of pyplot, which keeps global state and selects a display backend.
    with matplotlib.rc_context(STYLE):
        own, unit = own_metrics(rows), "sample" if any("epoch" in row for row in rows) else "token"
        count = 3 + len(own)
        figure = Figure(figsize=(11, 2.2 * count), dpi=150, facecolor="white")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(count, 2, width_ratios=(2.3, 1), left=LEFT, right=0.98, top=0.845, bottom=0.075)
        grid.update(wspace=0.27, hspace=0.42)
        loss = figure.add_subplot(grid[:, 0])
        loss.set_xlim(0, 1.015 * max(train[0] + validation[0]))
        _draw_loss(loss, train, validation, unit)
        for step in sorted({row["spike_step"] for row in rows if "spike_step" in row}):
            loss.axvline(step, color=FAINT, linewidth=0.8, linestyle=":")
            loss.annotate("spike", (step, 1), xycoords=("data", "axes fraction"), color=FAINT, fontsize=7, ha="center")
        small = [figure.add_subplot(grid[row, 1], sharex=loss) for row in range(count)]
        _draw_rate(small[0], _series(rows, "lr"))
        _draw_noisy(small[1], "gradient norm", _series(rows, "grad_norm"))
        _draw_noisy(small[2], f"{unit}s per second", _series(rows, "tokens_per_second"))
        for axes, name in zip(small[3:], own, strict=True):
            _draw_noisy(axes, name, _series(rows, TRAIN_METRIC + name), _series(rows, VAL_METRIC + name))
        for axes in (loss, small[-1]):
            axes.set_xlabel("step")
        for axes in small[:-1]:
            axes.tick_params(labelbottom=False)
        title = printable(jsonl.resolve().parent.name)
        figure.text(LEFT, 0.945, title, fontsize=15, weight="bold", parse_math=False)
        figure.text(LEFT, 0.91, _summary(rows, unit), color=FAINT)
        with replacing(out) as file:  # an interrupted plot leaves the previous one
            figure.savefig(file, format="png")
    return out


def smooth(values: list[float], width: float) -> list[float]:
    """Return the Gaussian moving average of standard deviation `width` (in values), renormalised at both ends to avoid
    bias."""
    if width < 0.5:
        return list(values)
    import numpy as np

    reach = math.ceil(3 * width)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    inside = slice(reach, reach + len(values))
    weighted, weight = (np.convolve(x, kernel)[inside] for x in (values, np.ones(len(values))))
    return (weighted / weight).tolist()


def own_metrics(rows: list[dict[str, Any]]) -> list[str]:
    """Return the names of a model's own metrics that training rows have."""
    return list(
        dict.fromkeys(key.removeprefix(TRAIN_METRIC) for row in rows for key in row if key.startswith(TRAIN_METRIC))
    )


def _series(rows: list[dict[str, Any]], key: str) -> Series:
    # A value of another type is from a damaged or foreign file.
    points = sorted((row["step"], row[key]) for row in rows if type(row.get(key)) in (int, float))
    return [step for step, _ in points], [value for _, value in points]


def _draw_loss(axes: "Axes", train: Series, validation: Series, unit: str) -> None:
    steps, values = train
    smoothed = smooth(values, len(values) / 120)
    axes.plot(steps, values, color=TRAIN, alpha=0.22, linewidth=0.9)
    axes.plot(steps, smoothed, color=TRAIN, linewidth=1.9, solid_capstyle="round", marker=_marker(values))
    ends = [(steps[-1], smoothed[-1], f"train\n{smoothed[-1]:.3f}", TRAIN)]
    if validation[0]:
        axes.plot(*validation, color=VALIDATION, linewidth=1.1, marker="o", markersize=4.5, markeredgecolor="white")
        ends.append((validation[0][-1], validation[1][-1], f"val\n{validation[1][-1]:.3f}", VALIDATION))
    _title(axes, "loss", f"nats per {unit}")
    _format(axes)
    # The loss falls from ln(vocabulary) within a few steps; showing all of that would flatten the rest.
    shown = smoothed[len(smoothed) // 50 :] + validation[1]
    low, high = min(shown + values[-len(values) // 2 :]), max(shown)
    margin = 0.06 * (high - low) or 0.1
    axes.set_ylim(low - 1.5 * margin, high + margin)
    _label_ends(axes, ends)


def _label_ends(axes: "Axes", ends: list[tuple[int, float, str, str]]) -> None:
    """Label the curves at their right ends instead of in a legend, without overlap."""
    points_per_unit = axes.get_window_extent().height * 72 / axes.figure.dpi / (axes.get_ylim()[1] - axes.get_ylim()[0])
    ends = sorted(ends, key=lambda end: -end[1])
    gap = (ends[0][1] - ends[-1][1]) * points_per_unit
    push = max(0.0, LABEL_HEIGHT - gap) / 2 if len(ends) > 1 else 0.0
    for (step, value, text, color), offset in zip(ends, (push, -push), strict=False):
        axes.annotate(
            text,
            (step, value),
            xytext=(8, offset),
            textcoords="offset points",
            va="center",
            color=color,
            weight="bold",
            linespacing=1.3,
        )


def _draw_rate(axes: "Axes", series: Series) -> None:
    axes.plot(*series, color=INK, linewidth=1.5, marker=_marker(series[1]))
    axes.fill_between(*series, color=INK, alpha=0.05, linewidth=0)
    _title(axes, "learning rate")
    _format(axes)
    axes.set_ylim(bottom=0)
    _ticks(axes.yaxis, short_tick, nbins=3, min_n_ticks=2)


def _draw_noisy(axes: "Axes", name: str, series: Series, validation: Series = ([], [])) -> None:
    steps, values = series
    _title(axes, name)
    _format(axes)
    if not values:
        return
    axes.plot(steps, values, color=TRAIN, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(values, len(values) / 80), color=TRAIN, linewidth=1.5, marker=_marker(values))
    if validation[0]:
        axes.plot(*validation, color=VALIDATION, linewidth=1.1, marker="o", markersize=3)
        values = values + validation[1]
    # The axis starts at zero, so that noise is shown to scale. The highest 1% of values may be cut off.
    highest = sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
    axes.set_ylim(0, 1.15 * highest or 1)
    _ticks(axes.yaxis, _tick, nbins=3, min_n_ticks=2)


def _title(axes: "Axes", name: str, unit: str = "") -> None:
    axes.set_title(printable(name), loc="left", fontsize=10, weight="bold", pad=7, parse_math=False)
    if unit:
        axes.set_title(unit, loc="right", fontsize=9, color=FAINT, pad=7)


def _format(axes: "Axes") -> None:
    axes.tick_params(length=0)
    _ticks(axes.xaxis, _tick, nbins=6, integer=True, steps=[1, 2, 5, 10])


def _ticks(axis: "Axis", formatter: Callable[[float], str], **where: Any) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(**where))
    axis.set_major_formatter(FuncFormatter(lambda value, _: formatter(value)))


def _tick(value: float) -> str:
    return f"{value:g}" if abs(value) < 1000 else f"{value / 1000:g}k" if abs(value) < 1e6 else f"{value / 1e6:g}M"


def _marker(values: list[float]) -> str:
    """Return a marker for the points of a short series, as the lines between them are no measurements; else ""."""
    return "." if len(values) <= SHORT else ""


def _seconds(steps: list[int], seconds: list[float]) -> float:
    """Return the seconds of all steps, from rows with the mean seconds of a step since the row before."""
    return sum(each * (step - before) for before, step, each in zip([0, *steps], steps, seconds, strict=False))


def _summary(rows: list[dict[str, Any]], unit: str) -> str:
    last = max(row["step"] for row in rows)
    parts = [f"{last:,} steps" if last != 1 else "1 step"]
    if tokens := _series(rows, "tokens")[1]:
        parts.append(f"{format_count(tokens[-1])} {unit}s")
    if (series := _series(rows, "step_seconds"))[1]:
        parts.append(f"{format_duration(_seconds(*series))} of training")
    if evaluations := [row for row in rows if type(row.get("val_loss")) in (int, float)]:
        best = min(evaluations, key=lambda row: row["val_loss"])
        measured = best.get("val_bits_per_byte")
        bits = f" ({measured:.4f} bits per byte)" if type(measured) in (int, float) and measured else ""
        parts.append(f"best validation loss {best['val_loss']:.4f}{bits}")
    return "   ·   ".join(parts)
