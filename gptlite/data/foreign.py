"""Token files of other frameworks: nanoGPT's, llm.c's and Megatron's, as documents.

nanoGPT writes raw uint16. llm.c writes 256 int32, the first three of them magic, version and number of tokens, then the
tokens: uint16 for GPT-2's vocabulary, uint32 for Llama 3's. Neither knows where documents begin but by the end of
document among the tokens: nanoGPT puts it behind each document, llm.c before it, and a document may go on in the next
file.
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
_BLOCK = 8 << 20  # tokens at a time
_DOCUMENTS = 8192  # at a time


@dataclass(frozen=True)
class Batch:
    """Whole documents: int32[N] tokens one after the other, int64[D] tokens of each, its end of document included."""

    tokens: np.ndarray
    lengths: np.ndarray


@dataclass
class Found:
    """What did not fit and was made to: counted, so that it can be said."""

    empty: int = 0  # documents without a token, left out
    unended: int = 0  # documents given an end


def open_nanogpt(path: Path) -> np.ndarray:
    """uint16[N], memory-mapped. ConfigError if the file cannot be that."""
    size = file_size(path)
    if size % 2:
        raise damaged(path, f"it has {size} bytes, and uint16 takes an even number")
    return np.memmap(path, dtype="<u2", mode="r") if size else np.empty(0, dtype="<u2")


def open_llmc(path: Path) -> np.ndarray:
    """uint16[N] or uint32[N], memory-mapped. ConfigError if header and size do not fit."""
    size, start = file_size(path), 4 * LLMC_HEADER
    if size < start:
        raise damaged(path, f"it has {size} bytes, fewer than the {start} of llm.c's header")
    magic, version, count = np.fromfile(path, dtype="<i4", count=3).tolist()
    if (magic, version) not in LLMC_TOKENS:
        known = " or ".join(f"{m} version {v}" for m, v in LLMC_TOKENS)
        raise damaged(path, f"it begins with {magic} version {version}, not llm.c's {known}")
    dtype = np.dtype(LLMC_TOKENS[magic, version])
    expected = start + count * dtype.itemsize
    if count < 0 or size != expected:
        raise damaged(path, f"it has {size} bytes where its header says {count} tokens, {expected} bytes")
    return np.memmap(path, dtype=dtype, mode="r", offset=start) if count else np.empty(0, dtype=dtype)


def cut_at_ends(
    files: Sequence[tuple[Path, np.ndarray]], eod: int, vocab_size: int, before: bool, found: Found, progress: Progress
) -> Iterator[Batch]:
    """The documents of files that follow one another, cut behind each `eod`.

    `before`: documents begin with `eod`; then the first one goes, and the last document is given its end. What is cut
    off in the middle is given one too, and counted. ConfigError where a token is outside the vocabulary.
    """
    pending: list[np.ndarray] = []  # of the document that goes on
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
    """The documents of a Megatron dataset, its sequences joined; those without tokens are left out and counted.

    A document that does not end with `eod` is given one. ConfigError where a token is outside the vocabulary, or a
    sequence is not of text.
    """
    if dataset.modes is not None and dataset.modes.any():
        raise ConfigError(f"{dataset.idx} holds sequences that are not text, by their modes; give a text dataset")
    before = 0
    for start in range(0, dataset.num_documents, _DOCUMENTS):
        stops = dataset.document_stops(start, min(start + _DOCUMENTS, dataset.num_documents))
        lengths = np.diff(stops, prepend=before)
        if lengths.min() < 0:
            dataset.check_index(0, len(dataset.lengths) + dataset.num_documents)  # which names it
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
        yield Batch(np.insert(ids, ends[unended], eod), lengths + unended)


def checked(ids: np.ndarray, path: Path, start: int, vocab_size: int) -> np.ndarray:
    """int32 ids. ConfigError naming the file and the token, of which `start` come before, outside the vocabulary."""
    if (place := outside(ids, vocab_size)) is not None:
        raise ConfigError(
            f"{path}: token {start + place} is {ids[place]}, outside the vocabulary of {vocab_size}; "
            "give the tokenizer= that made the file, and its format="
        )
    return ids.astype(np.int32)
