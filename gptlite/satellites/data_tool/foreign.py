"""Readers that yield the documents in token files of nanoGPT, llm.c, datatrove and Megatron.

nanoGPT writes raw uint16 tokens; others write raw tokens of other types, e.g. OLMo-core. llm.c writes 256 int32 as a
header (magic number, version, number of tokens), then the tokens: uint16 for GPT-2's vocabulary, uint32 for Llama 3's.
In these formats only the end-of-document token separates documents. nanoGPT puts it after each document, llm.c before
it. A document may continue in the next file. datatrove writes raw uint16 or uint32 tokens, and FILE.index with the
documents' ends, counted in tokens, in uint64.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptlite.data.indexed import IndexedDataset, damaged, file_size, outside
from gptlite.errors import ConfigError
from gptlite.progress import Progress
from gptlite.satellites.corpus.recognize import refuse_start

RAW = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4", "int32": "<i4", "int64": "<i8"}  # types of raw tokens
LLMC_HEADER = 256  # int32
LLMC_TOKENS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # dtype by magic and version
_BLOCK = 8 << 20  # tokens read at a time
_DOCUMENTS = 8192  # read at a time
_LOOKED_AT = 1 << 20  # tokens, an even number


@dataclass(frozen=True)
class DocumentBatch:
    """Whole documents: concatenated tokens, int32[N], and each document's length with its EOD token, int64[D]."""

    tokens: np.ndarray
    lengths: np.ndarray


@dataclass
class Corrections:
    """Counts of the corrections made during an import, for its report."""

    empty: int = 0  # documents without tokens, which were left out
    unended: int = 0  # documents to which an EOD token was added


def open_nanogpt(path: Path, dtype: str | None, vocab_size: int) -> np.ndarray:
    """Memory-map a file of raw tokens, of type `dtype` or uint16. Raises ConfigError for a file with a header, one that
    is not a whole number of tokens, or one whose type is in doubt."""
    size = file_size(path)
    if dtype is None:
        refuse_start("format=nanogpt", path)
        if LLMC_TOKENS.keys() & {tuple(np.fromfile(path, dtype="<i4", count=2).tolist())}:
            raise ConfigError(f"format=nanogpt: {path} begins with llm.c's header; give format=llmc")
        if vocab_size > 1 << 16:
            raise ConfigError(
                f"format=nanogpt: {path}: the vocabulary of {vocab_size:,} does not fit in uint16; give dtype=uint32, "
                "or dtype=uint16 if that is what the file has"
            )
    kind = np.dtype(RAW[dtype or "uint16"])
    if size % kind.itemsize:
        raise damaged(path, f"it has {size} bytes, not a whole number of {dtype or 'uint16'} tokens")
    tokens = np.memmap(path, dtype=kind, mode="r") if size else np.empty(0, dtype=kind)
    if dtype is None and size and size % 4 == 0 and _as_wide(tokens):
        raise ConfigError(
            f"format=nanogpt: every second number of {path} is 0, as if its tokens had 4 bytes; give dtype=uint32, or "
            "dtype=uint16 if that is right"
        )
    return tokens


def _as_wide(tokens: np.ndarray) -> bool:
    """Return True if uint16[2 N] are uint32[N] below 65,536, not all of them 0."""
    starts = range(0, len(tokens), _LOOKED_AT)
    return not any(tokens[start + 1 : start + _LOOKED_AT : 2].any() for start in starts) and bool(tokens.any())


def open_datatrove(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Memory-map a .ds file as uint16[N] or uint32[N]. Return it with the documents' ends, uint64[D].

    Raises ConfigError for a missing index, or one that does not fit the file.
    """
    index, size = path.with_name(f"{path.name}.index"), file_size(path)
    if not index.exists():
        raise ConfigError(
            f"{index}, with the documents' ends, does not exist; copy it too, or give format=nanogpt dtype=uint16 (or "
            "uint32) if every document ends with the end-of-document token"
        )
    if file_size(index) % 8:
        raise damaged(index, f"it has {file_size(index)} bytes, not a whole number of uint64")
    ends = np.fromfile(index, dtype="<u8")
    count = int(ends[-1]) if ends.size else 0
    dtype = next((each for each in ("<u2", "<u4") if count * np.dtype(each).itemsize == size), None)
    if dtype is None or (ends[1:] < ends[:-1]).any():  # so that all fit in int64
        raise damaged(index, f"its documents end at token {count}, but {path.name} has {size} bytes")
    return np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype=dtype), ends.astype(np.int64)


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
    files: Sequence[tuple[Path, np.ndarray]],
    eod: int,
    vocab_size: int,
    before: bool,
    counts: Corrections,
    progress: Progress,
) -> Iterator[DocumentBatch]:
    """Yield the documents of consecutive files, cut after each `eod`.

    With `before`, documents begin with `eod`: the first `eod` is dropped and one is added at the very end. Otherwise an
    unfinished last document gets an `eod` and is counted in `counts`. Raises ConfigError for a token outside the
    vocabulary.
    """
    pending: list[np.ndarray] = []  # tokens of the unfinished document
    first = True
    for path, tokens in files:
        for start in range(0, len(tokens), _BLOCK):
            ids = checked_ids(tokens[start : start + _BLOCK], path, start, vocab_size)
            progress.add(ids.size * tokens.itemsize)
            if first and before and ids[0] == eod:
                ids = ids[1:]
            first = False
            ends = np.flatnonzero(ids == eod) + 1
            if ends.size:
                # Up to the last end in this block; the rest belongs to a document that continues in the next block.
                whole = np.concatenate([*pending, ids[: ends[-1]]])
                yield DocumentBatch(whole, np.diff(ends + (whole.size - ends[-1]), prepend=0))
                pending = []
            pending.append(ids[ends[-1] :] if ends.size else ids)
    if rest := sum(part.size for part in pending):
        counts.unended += not before
        yield DocumentBatch(np.concatenate([*pending, np.array([eod], dtype=np.int32)]), np.array([rest + 1]))


def megatron_documents(
    dataset: IndexedDataset, eod: int, vocab_size: int, counts: Corrections, progress: Progress
) -> Iterator[DocumentBatch]:
    """Yield a Megatron dataset's documents, each with its sequences joined, as `cut_at_stops` does. Raises ConfigError
    for a sequence that is not text."""
    if dataset.modes is not None and dataset.modes.any():
        raise ConfigError(f"{dataset.idx} has sequences with a mode other than text; give a text dataset")

    def stops() -> Iterator[np.ndarray]:
        before = 0
        for start in range(0, dataset.num_documents, _DOCUMENTS):
            positions = dataset.document_stops(start, min(start + _DOCUMENTS, dataset.num_documents))
            if np.diff(positions, prepend=before).min() < 0:
                dataset.check_index(0, len(dataset.lengths) + dataset.num_documents)  # raises, with the position
            before = int(positions[-1])
            yield positions

    return cut_at_stops(dataset.bin, dataset.tokens, stops(), eod, vocab_size, counts, progress)


def datatrove_documents(
    path: Path, tokens: np.ndarray, ends: np.ndarray, eod: int, vocab_size: int, counts: Corrections, progress: Progress
) -> Iterator[DocumentBatch]:
    """Yield the documents of a .ds file that end at `ends`, as `cut_at_stops` does."""
    stops = (ends[start : start + _DOCUMENTS] for start in range(0, len(ends), _DOCUMENTS))
    return cut_at_stops(path, tokens, stops, eod, vocab_size, counts, progress)


def cut_at_stops(
    path: Path,
    tokens: np.ndarray,
    stops: Iterable[np.ndarray],
    eod: int,
    vocab_size: int,
    counts: Corrections,
    progress: Progress,
) -> Iterator[DocumentBatch]:
    """Yield the documents of `tokens`, which end at `stops`, int64[D] at a time. Empty ones are left out and counted.

    A document that does not end with `eod` gets one and is counted. Raises ConfigError for a token outside the
    vocabulary.
    """
    before = 0
    for each in stops:
        lengths = np.diff(each, prepend=before)
        ids = checked_ids(tokens[before : each[-1]], path, before, vocab_size)
        before = int(each[-1])
        progress.add(ids.size * tokens.itemsize)
        counts.empty += int((lengths == 0).sum())
        lengths = lengths[lengths > 0]
        if not lengths.size:
            continue
        ends = np.cumsum(lengths)
        unended = ids[ends - 1] != eod
        counts.unended += int(unended.sum())
        # np.insert takes positions in `ids` before any insertion
        yield DocumentBatch(np.insert(ids, ends[unended], eod), lengths + unended)


def checked_ids(ids: np.ndarray, path: Path, start: int, vocab_size: int) -> np.ndarray:
    """Return the ids as int32. Raises ConfigError for an id outside the vocabulary. ids[0] is at position `start`."""
    if (place := outside(ids, vocab_size)) is not None:
        raise ConfigError(
            f"{path}: token {start + place} is {ids[place]}, outside the vocabulary of {vocab_size}; "
            "give the tokenizer= that made the file, and its format="
        )
    return ids.astype(np.int32)
