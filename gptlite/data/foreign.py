"""Readers that yield the documents in token files of nanoGPT, llm.c and Megatron.

nanoGPT writes raw uint16 tokens. llm.c writes 256 int32 as a header (magic number, version, number of tokens), then the
tokens: uint16 for GPT-2's vocabulary, uint32 for Llama 3's. In both formats only the end-of-document token
separates documents. nanoGPT puts it after each document, llm.c before it. A document may continue in the next file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptlite.data.indexed import IndexedDataset, damaged, file_size, outside
from gptlite.errors import ConfigError
from gptlite.progress import Progress

LLMC_HEADER = 256  # int32
LLMC_TOKENS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # dtype by magic and version
_BLOCK = 8 << 20  # tokens read at a time
_DOCUMENTS = 8192  # read at a time


@dataclass(frozen=True)
class Batch:
    """Whole documents: concatenated tokens, int32[N], and each document's length with its EOD token, int64[D]."""

    tokens: np.ndarray
    lengths: np.ndarray


@dataclass
class Found:
    """Counts of the corrections made during an import, for its report."""

    empty: int = 0  # documents without tokens, which were left out
    unended: int = 0  # documents to which an EOD token was added


def open_nanogpt(path: Path) -> np.ndarray:
    """Memory-map a nanoGPT file as uint16[N]. Raises ConfigError if it is missing or its size is odd."""
    size = file_size(path)
    if size % 2:
        raise damaged(path, f"it has {size} bytes, not a whole number of uint16 tokens")
    return np.memmap(path, dtype="<u2", mode="r") if size else np.empty(0, dtype="<u2")


def open_llmc(path: Path) -> np.ndarray:
    """Memory-map an llm.c file as uint16[N] or uint32[N]. Raises ConfigError for an unknown header or a wrong size."""
    size, start = file_size(path), 4 * LLMC_HEADER
    if size < start:
        raise damaged(path, f"it has {size} bytes, fewer than the {start} of llm.c's header")
    magic, version, count = np.fromfile(path, dtype="<i4", count=3).tolist()
    if (magic, version) not in LLMC_TOKENS:
        known = " or ".join(f"{m} version {v}" for m, v in LLMC_TOKENS)
        raise damaged(path, f"it begins with magic {magic} and version {version}, not llm.c's {known}")
    dtype = np.dtype(LLMC_TOKENS[magic, version])
    expected = start + count * dtype.itemsize
    if count < 0 or size != expected:
        raise damaged(path, f"it has {size} bytes, but its header gives {count} tokens, {expected} bytes")
    return np.memmap(path, dtype=dtype, mode="r", offset=start) if count else np.empty(0, dtype=dtype)


def cut_at_ends(
    files: Sequence[tuple[Path, np.ndarray]], eod: int, vocab_size: int, before: bool, found: Found, progress: Progress
) -> Iterator[Batch]:
    """Yield the documents of consecutive files, cut after each `eod`.

    With `before`, documents begin with `eod`: the first `eod` is dropped and one is added at the very end. Otherwise an
    unfinished last document gets an `eod` and is counted in `found`. Raises ConfigError for a token outside the
    vocabulary.
    """
    pending: list[np.ndarray] = []  # tokens of the unfinished document
    first = True
    for path, tokens in files:
        for start in range(0, len(tokens), _BLOCK):
            ids = checked(tokens[start : start + _BLOCK], path, start, vocab_size)
            progress.add(ids.size * tokens.itemsize)
            if first and before and ids[0] == eod:
                ids = ids[1:]
            first = False
            ends = np.flatnonzero(ids == eod) + 1
            if ends.size:
                # Up to the last end in this block; the rest belongs to a document that continues in the next block.
                whole = np.concatenate([*pending, ids[: ends[-1]]])
                yield Batch(whole, np.diff(ends + (whole.size - ends[-1]), prepend=0))
                pending = []
            pending.append(ids[ends[-1] :] if ends.size else ids)
    if rest := sum(part.size for part in pending):
        found.unended += not before
        yield Batch(np.concatenate([*pending, np.array([eod], dtype=np.int32)]), np.array([rest + 1]))


def megatron_documents(
    dataset: IndexedDataset, eod: int, vocab_size: int, found: Found, progress: Progress
) -> Iterator[Batch]:
    """Yield a Megatron dataset's documents, each with its sequences joined. Empty documents are left out and counted.

    A document that does not end with `eod` gets one and is counted. Raises ConfigError for a token outside the
    vocabulary, or a sequence that is not text.
    """
    if dataset.modes is not None and dataset.modes.any():
        raise ConfigError(f"{dataset.idx} has sequences with a mode other than text; give a text dataset")
    before = 0
    for start in range(0, dataset.num_documents, _DOCUMENTS):
        stops = dataset.document_stops(start, min(start + _DOCUMENTS, dataset.num_documents))
        lengths = np.diff(stops, prepend=before)
        if lengths.min() < 0:
            dataset.check_index(0, len(dataset.lengths) + dataset.num_documents)  # raises, with the position
        ids = checked(dataset.tokens[before : stops[-1]], dataset.bin, before, vocab_size)
        before = int(stops[-1])
        progress.add(ids.size * dataset.dtype.itemsize)
        found.empty += int((lengths == 0).sum())
        lengths = lengths[lengths > 0]
        if not lengths.size:
            continue
        ends = np.cumsum(lengths)
        unended = ids[ends - 1] != eod
        found.unended += int(unended.sum())
        # np.insert takes positions in `ids` before any insertion
        yield Batch(np.insert(ids, ends[unended], eod), lengths + unended)


def checked(ids: np.ndarray, path: Path, start: int, vocab_size: int) -> np.ndarray:
    """Return the ids as int32. Raises ConfigError for an id outside the vocabulary. ids[0] is at position `start`."""
    if (place := outside(ids, vocab_size)) is not None:
        raise ConfigError(
            f"{path}: token {start + place} is {ids[place]}, outside the vocabulary of {vocab_size}; "
            "give the tokenizer= that made the file, and its format="
        )
    return ids.astype(np.int32)
