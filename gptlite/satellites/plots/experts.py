"""Plot of the experts' loads in a mixture of experts over the steps of a metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gptlite.files import replacing
from gptlite.metrics.console import EXPERT_LOADS
from gptlite.metrics.jsonl import read_rows
from gptlite.satellites.plots.style import FAINT, STYLE

MOST_LAYERS, MOST_STEPS = 8, 400  # limits of the picture; the layers and steps shown are evenly spaced


def plot_loads(jsonl: Path, out: Path) -> Path | None:
    """Plot each expert's load divided by the mean load of its layer, with a panel for each layer, to the PNG `out`.
    Returns `out`, or None unless rows have loads, all of the same model."""
    rows = [row for row in read_rows(jsonl) if row.get(EXPERT_LOADS)]
    shapes = [[len(layer) for layer in row[EXPERT_LOADS]] for row in rows]
    if not rows or any(shape != [shapes[0][0]] * len(shapes[0]) for shape in shapes) or not shapes[0][0]:
        return None

    import matplotlib
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = _chosen(rows, MOST_STEPS)
    loads = np.array([row[EXPERT_LOADS] for row in rows], dtype=float)  # [steps, layers, experts]
    loads /= np.maximum(loads.mean(-1, keepdims=True), 1e-9)
    layers = _chosen(list(range(loads.shape[1])), MOST_LAYERS)
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(9, 0.7 + 1.25 * len(layers)), dpi=150, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(layers), 1, sharex=True, squeeze=False)[:, 0]
        first, last, count = rows[0]["step"], rows[-1]["step"], loads.shape[2]
        for axes, layer in zip(panels, layers, strict=True):
            image = axes.imshow(
                loads[:, layer].T,
                aspect="auto",
                interpolation="nearest",
                cmap="RdBu_r",
                vmin=0.0,
                vmax=2.0,
                extent=(first, max(last, first + 1), count - 0.5, -0.5),
            )
            axes.set_ylabel(f"layer {layer + 1}", color=FAINT)
            axes.set_yticks([0, count - 1])
        panels[-1].set_xlabel("step")
        panels[0].set_title("tokens of each expert, divided by the mean of its layer", loc="left", fontsize=10)
        figure.colorbar(image, ax=panels.tolist(), extend="max", shrink=0.6 if len(layers) > 2 else 1.0)
        with replacing(out) as file:
            figure.savefig(file, format="png")
    return out


def _chosen(values: list[Any], most: int) -> list[Any]:
    """Return at most `most` of the values, evenly spaced, including the first and the last."""
    if len(values) <= most:
        return values
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]
