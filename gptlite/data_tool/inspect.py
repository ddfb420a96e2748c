"""What is in token files: inspect PATH ... [plot=FILE.png] [json=true]

Documents, tokens, bytes per token, dtype, the lengths of documents, and the tokenizer. plot=FILE.png draws the lengths;
json=true prints the same for scripts. The index is read, the tokens are not: `verify` does that. Exit code 1 if a
dataset is damaged.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gptlite.data.indexed import IndexedDataset
from gptlite.data_tool.places import all_prefixes, tokenizer_beside
from gptlite.errors import ConfigError
from gptlite.metrics.console import format_bytes, table

_BAR = 40  # characters
_BINS = 48  # of the picture


@dataclass
class Options:
    """What may follow the paths."""

    plot: str | None = None
    json: bool = False


def run(paths: list[str], options: Options) -> int:
    """Prints it. Returns 1 if a dataset is damaged."""
    if options.plot is not None and Path(options.plot).suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"plot={options.plot} is not a picture; give FILE.png, .svg or .pdf")
    found, damage = _open(all_prefixes(paths))
    lengths = {prefix: document_lengths(dataset) for prefix, dataset in found.items()}
    if options.json:
        every = [describe(dataset, lengths[prefix]) for prefix, dataset in found.items()]
        print(json.dumps({"datasets": every, "damage": damage}, indent=1))
    else:
        _print(found, lengths)
        print(*(f"DAMAGED  {reason}" for reason in damage), sep="\n", end="\n" * bool(damage))
    if options.plot is not None:
        plot_lengths({str(prefix): each for prefix, each in lengths.items()}, Path(options.plot))
        print(f"lengths drawn into {options.plot}")
    return 1 if damage else 0


def _open(prefixes: list[Path]) -> tuple[dict[Path, IndexedDataset], list[str]]:
    found, damage = {}, []
    for prefix in prefixes:
        try:
            found[prefix] = IndexedDataset(prefix)
        except ConfigError as error:
            damage.append(str(error))
    return found, damage


def document_lengths(dataset: IndexedDataset) -> np.ndarray:
    """int64[documents]: tokens of each, ends of documents included."""
    return np.diff(dataset.document_stops(0, dataset.num_documents), prepend=0)


def describe(dataset: IndexedDataset, lengths: np.ndarray) -> dict[str, Any]:
    """All that is known, as JSON."""
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
    """UTF-8 bytes of text a token stands for, ends of documents left out; None where it is not known."""
    if dataset.meta is None or len(dataset.tokens) == dataset.num_documents:
        return None
    return dataset.meta.text_bytes / (len(dataset.tokens) - dataset.num_documents)


def histogram(lengths: np.ndarray) -> Iterator[tuple[str, int]]:
    """How many documents have 0, 1, 2-3, 4-7, ... tokens; from the first that has any to the last."""
    octaves = np.bincount(np.frexp(lengths.astype(np.float64))[1]) if lengths.size else np.zeros(0, dtype=np.int64)
    for octave in range(int(np.flatnonzero(octaves)[0]) if octaves.any() else 0, len(octaves)):
        low, high = 2**octave // 2, 2**octave - 1
        yield (f"{low:,}" if high <= low else f"{low:,} - {high:,}"), int(octaves[octave])


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


def _print(found: dict[Path, IndexedDataset], lengths: dict[Path, np.ndarray]) -> None:
    facts = {prefix: describe(dataset, lengths[prefix]) for prefix, dataset in found.items()}
    header = ("dataset", "documents", "tokens", "bytes/token", "dtype", "size", "sha256")
    rows = [
        (
            str(prefix),
            f"{each['documents']:,}",
            f"{each['tokens']:,}",
            "n/a" if each["bytes_per_token"] is None else f"{each['bytes_per_token']:.3f}",
            each["dtype"] + ", modes" * each["multimodal"],
            format_bytes(each["bytes"]),
            each["meta"]["sha256"][:12] if each["meta"] else "n/a",
        )
        for prefix, each in facts.items()
    ]
    print(*table(header, rows), sep="\n")
    words = ("min", "p10", "p50", "mean", "p90", "p99", "max")
    rows = [
        (str(prefix), *(f"{round(each['lengths'][word]):,}" if each["lengths"] else "n/a" for word in words))
        for prefix, each in facts.items()
    ]
    print("", *table(("tokens a document", *words), rows), sep="\n")
    for prefix, each in lengths.items():
        print(f"\n{prefix}", *_bars(list(histogram(each))), sep="\n")
    print("", *_tokenizers(found), sep="\n")


def _bars(counts: list[tuple[str, int]]) -> Iterator[str]:
    most = max((count for _, count in counts), default=0)
    width = max((len(label) for label, _ in counts), default=0)
    for label, count in counts:
        yield f"  {label:>{width}} tokens  {'#' * -(-count * _BAR // most):<{_BAR}} {count:,}".rstrip()


def _tokenizers(found: dict[Path, IndexedDataset]) -> Iterator[str]:
    for folder in dict.fromkeys(prefix.parent for prefix in found):
        try:
            tokenizer = tokenizer_beside(folder / "any")
        except ConfigError as error:
            yield f"tokenizer of {folder}: DAMAGED, {error}"
            continue
        if tokenizer is None:
            yield f"tokenizer of {folder}: none beside the data"
            continue
        fits = [each.meta.tokenizer == tokenizer.fingerprint for each in found.values() if each.meta]
        yield (
            f"tokenizer of {folder}: {tokenizer.kind}, vocabulary {tokenizer.vocab_size:,}, end of document "
            f"{tokenizer.eod}, fingerprint {tokenizer.fingerprint[:12]}"
            + ("" if all(fits) else "; NOT the one that wrote the data")
        )
