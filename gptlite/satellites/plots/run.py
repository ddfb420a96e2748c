"""Plots of a run, in its folder."""

from __future__ import annotations

from pathlib import Path

from gptlite.errors import ConfigError
from gptlite.satellites.plots.curves import plot_curves
from gptlite.satellites.plots.experts import plot_loads
from gptlite.trainer.result import CURVES

EXPERTS = "experts.png"  # in the run folder


def plot_run(folder: Path) -> dict[str, Path]:
    """Plot the curves of a run and, for a mixture of experts, its loads. Returns the paths by the name of the plot.

    Plots nothing if no step was logged, or if the plots are newer than the metrics.
    """
    rows, curves = folder / "metrics.jsonl", folder / CURVES
    if not rows.exists() or (curves.exists() and curves.stat().st_mtime_ns > rows.stat().st_mtime_ns):
        return {}
    try:
        plots = {"curves": plot_curves(rows, curves), "expert loads": plot_loads(rows, folder / EXPERTS)}
    except ConfigError:  # no row has a loss
        return {}
    return {name: path for name, path in plots.items() if path is not None}
