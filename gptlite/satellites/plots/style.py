"""Colors, font and tick labels of all plots."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axis import Axis

TRAIN, VALIDATION, INK, FAINT = "#2460a7", "#d1602a", "#23272e", "#7a828e"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": "#c3c8d0",
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eceef1",
    "grid.linewidth": 0.8,
    "xtick.color": "#c3c8d0",
    "ytick.color": "#c3c8d0",
    "xtick.labelcolor": FAINT,
    "ytick.labelcolor": FAINT,
}


def label_log_ticks(axis: Axis, formatter: Callable[[float], str]) -> None:
    """Label a logarithmic axis, whose limits must be set, in plain text instead of matplotlib's formulas."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5) if high < 100 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: formatter(value)))
    axis.set_minor_formatter(NullFormatter())


def short_tick(value: float) -> str:
    """Return a value as `3e-4` or `1.5e-4`."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}" if value else "0"
