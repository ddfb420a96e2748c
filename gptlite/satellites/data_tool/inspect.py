"""Describe token files: inspect PATH ... [plot=FILE.png] [json=true]

Prints documents, tokens, bytes per token, dtype, document lengths, and the tokenizer. plot=FILE.png draws the lengths;
json=true prints the same data as JSON. Only the index is read; `verify` reads the tokens too. Exit code 1 if a dataset
is damaged.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gptlite.data.indexed import IndexedDataset
from gptlite.errors import ConfigError, printable
from gptlite.metrics.console import format_bytes, format_count, table
from gptlite.satellites.data_tool.places import all_prefixes, tokenizer_beside
from gptlite.satellites.plots.style import STYLE, label_log_ticks

_BAR = 40  # characters
_BINS = 48  # histogram bins of the plot


@dataclass
class Options:
    """Command-line options."""

    plot: str | None = None
    json: bool = False


def run(paths: list[str], options: Options) -> int:
    """Print the description. Return 1 if a dataset is damaged, otherwise 0."""
    if options.plot is not None and Path(options.plot).suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"plot={options.plot} is not an image file; give FILE.png, .svg or .pdf")
    datasets, damage = _open(all_prefixes(paths))
    lengths = {prefix: document_lengths(dataset) for prefix, dataset in datasets.items()}
    if options.json:
        every = [describe(dataset, lengths[prefix]) for prefix, dataset in datasets.items()]
        print(json.dumps({"datasets": every, "damage": damage}, indent=1))
    else:
        _print(datasets, lengths)
        print(*(printable(f"DAMAGED  {reason}") for reason in damage), sep="\n", end="\n" if damage else "")
    if options.plot is not None:
        plot_lengths({str(prefix): each for prefix, each in lengths.items()}, Path(options.plot))
        print(f"document lengths plotted into {options.plot}")
    return 1 if damage else 0


def _open(prefixes: list[Path]) -> tuple[dict[Path, IndexedDataset], list[str]]:
    datasets, damage = {}, []
    for prefix in prefixes:
        try:
            datasets[prefix] = IndexedDataset(prefix)
        except ConfigError as error:
            damage.append(str(error))
    return datasets, damage


def document_lengths(dataset: IndexedDataset) -> np.ndarray:
    """Return the number of tokens in each document, with its EOD token: int64[documents]."""
    return np.diff(dataset.document_stops(0, dataset.num_documents), prepend=0)


def describe(dataset: IndexedDataset, lengths: np.ndarray) -> dict[str, Any]:
    """Return the description of a dataset as JSON-compatible values. `lengths` are its document lengths."""
    quantiles = {f"p{q}": round(float(np.percentile(lengths, q))) for q in (10, 50, 90, 99)} if lengths.size else {}
    ends = {"min": int(lengths.min()), "mean": float(lengths.mean()), "max": int(lengths.max())} if lengths.size else {}
    return {
        "prefix": str(dataset.prefix),
        "documents": dataset.num_documents,
        "empty_documents": int((lengths == 0).sum()),
        "sequences": len(dataset.lengths),
        "tokens": len(dataset.tokens),
        "bytes": dataset.tokens.nbytes,
        "dtype": str(dataset.dtype),
        "multimodal": dataset.modes is not None,
        "bytes_per_token": bytes_per_token(dataset),
        "lengths": ends | quantiles,
        "meta": asdict(dataset.meta) if dataset.meta else None,
    }


def bytes_per_token(dataset: IndexedDataset) -> float | None:
    """Return the mean UTF-8 bytes of text per token, not counting EOD tokens; None if unknown."""
    if dataset.meta is None or len(dataset.tokens) == dataset.num_documents:
        return None
    return dataset.meta.text_bytes / (len(dataset.tokens) - dataset.num_documents)


def histogram(lengths: np.ndarray) -> Iterator[tuple[str, int]]:
    """Yield (range, documents) for lengths of 0, 1, 2-3, 4-7, ... tokens, from the first range in use to the last."""
    octaves = np.bincount(np.frexp(lengths.astype(np.float64))[1]) if lengths.size else np.zeros(0, dtype=np.int64)
    for octave in range(int(np.flatnonzero(octaves)[0]) if octaves.any() else 0, len(octaves)):
        low, high = 2**octave // 2, 2**octave - 1
        yield (f"{low:,}" if high <= low else f"{low:,} - {high:,}"), int(octaves[octave])


def plot_lengths(lengths: Mapping[str, np.ndarray], path: Path) -> None:
    """Plot histograms of document lengths, {dataset: int64[documents]}, on a logarithmic axis into the file `path`.

    Heights are fractions of the dataset's tokens, not of its documents, since a run reads tokens.
    """
    import matplotlib
    from matplotlib.figure import Figure

    some = [each[each > 0] for each in lengths.values() if each.any()] or [np.ones(1)]
    edges = np.geomspace(min(each.min() for each in some), max(each.max() for each in some) + 1, _BINS + 1)
    # File names are not parsed as formulas. Without pyplot, no global state is changed.
    with matplotlib.rc_context({**STYLE, "text.parse_math": False}):
        figure = Figure(figsize=(8, 4.5 + 0.2 * len(some)), dpi=150, facecolor="white", layout="constrained")
        axes = figure.add_subplot()
        for name, sizes in lengths.items():
            if not sizes.sum():
                continue
            label = f"{name}: {sizes.size:,} documents, {format_count(sizes.sum())} tokens"
            axes.hist(sizes, edges.tolist(), weights=sizes / sizes.sum(), histtype="step", linewidth=1.5, label=label)
        axes.set(xscale="log", xlabel="tokens in a document", ylabel="fraction of all tokens")
        axes.set_title("Document lengths", loc="left", fontsize=15, weight="bold", pad=12)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
        label_log_ticks(axes.xaxis, "{:,.0f}".format)
        if axes.has_data():
            figure.legend(loc="outside lower left", frameon=False)  # below the axes, where it covers no bar
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _print(datasets: dict[Path, IndexedDataset], lengths: dict[Path, np.ndarray]) -> None:
    facts = {prefix: describe(dataset, lengths[prefix]) for prefix, dataset in datasets.items()}
    header = ("dataset", "documents", "tokens", "bytes/token", "dtype", "size", "sha256")
    rows = [
        (
            str(prefix),
            f"{summary['documents']:,}",
            f"{summary['tokens']:,}",
            "n/a" if summary["bytes_per_token"] is None else f"{summary['bytes_per_token']:.3f}",
            summary["dtype"] + ", modes" * summary["multimodal"],
            format_bytes(summary["bytes"]),
            summary["meta"]["sha256"][:12] if summary["meta"] else "n/a",
        )
        for prefix, summary in facts.items()
    ]
    print(*table(header, rows), sep="\n")
    statistics = ("min", "p10", "p50", "mean", "p90", "p99", "max")
    rows = [
        (str(prefix), *(f"{round(summary['lengths'][word]):,}" if summary["lengths"] else "n/a" for word in statistics))
        for prefix, summary in facts.items()
    ]
    print("", *table(("tokens per document", *statistics), rows), sep="\n")
    for prefix, each in lengths.items():
        print("", printable(prefix), *_bars(list(histogram(each))), sep="\n")
    print("", *map(printable, _tokenizers(datasets)), sep="\n")


def _bars(counts: list[tuple[str, int]]) -> Iterator[str]:
    most = max((count for _, count in counts), default=0)
    width = max((len(label) for label, _ in counts), default=0)
    for label, count in counts:
        yield f"  {label:>{width}} tokens  {'#' * -(-count * _BAR // most):<{_BAR}} {count:,}".rstrip()


def _tokenizers(datasets: dict[Path, IndexedDataset]) -> Iterator[str]:
    for folder in dict.fromkeys(prefix.parent for prefix in datasets):
        try:
            tokenizer = tokenizer_beside(folder / "any")
        except ConfigError as error:
            yield f"tokenizer of {folder}: DAMAGED, {error}"
            continue
        if tokenizer is None:
            yield f"tokenizer of {folder}: none beside the data"
            continue
        fits = [each.meta.tokenizer == tokenizer.fingerprint for each in datasets.values() if each.meta]
        yield (
            f"tokenizer of {folder}: {tokenizer.kind}, vocabulary {tokenizer.vocab_size:,}, end of document "
            f"{tokenizer.eod}, fingerprint {tokenizer.fingerprint[:12]}"
            + ("" if all(fits) else "; NOT the tokenizer of the data")
        )
