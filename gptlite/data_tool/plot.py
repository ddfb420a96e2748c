"""The lengths of documents, drawn."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

_BINS = 48


def plot_lengths(lengths: Mapping[str, np.ndarray], path: Path) -> None:
    """A histogram of tokens a document, on a logarithmic axis, for each named int64[documents], into `path`.

    Heights are shares of each dataset's tokens, not of its documents: that is what a run reads.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    some = [each[each > 0] for each in lengths.values() if each.any()] or [np.ones(1)]
    edges = np.geomspace(min(each.min() for each in some), max(each.max() for each in some) + 1, _BINS + 1)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, each in lengths.items():
        if not each.sum():
            continue
        label = f"{name}: {each.size:,} documents, {each.sum() / 1e6:,.2f}M tokens"
        axes.hist(each, edges.tolist(), weights=each / each.sum(), histtype="step", linewidth=1.5, label=label)
    axes.set(xscale="log", xlabel="tokens in a document", ylabel="share of all tokens", title="Lengths of documents")
    axes.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0, decimals=0))  # type: ignore[attr-defined]
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(loc="upper left", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
