"""Megatron's indexed datasets: tokenized documents in PREFIX.bin and PREFIX.idx, with gptlite's PREFIX.meta.json.

    .bin   concatenated tokens of all sequences
    .idx   offset  0  9 bytes      b"MMIDIDX\\0\\0"
           offset  9  uint64       version, 1
           offset 17  uint8        dtype code, see DTYPES
           offset 18  uint64       S, the number of sequences
           offset 26  uint64       D, the number of documents + 1
           offset 34  int32[S]     tokens in each sequence
                      int64[S]     byte at which each sequence starts in .bin
                      int64[D]     first sequence of each document; the last entry is S
                      int8[S]      modes, of multimodal datasets only

All values are little-endian. For an empty document, Megatron adds a document index but no sequence. gptlite
writes one sequence per document and ends each with the tokenizer's `eod`, so that chunks can be cut from .bin as one
stream.
"""

import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from gptlite import limits
from gptlite.documents import Between, Count, read_json
from gptlite.errors import ConfigError, system_error
from gptlite.files import open_regular

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats, never tokens
HEADER = struct.Struct("<9sQBQQ")
_UINT16_VOCAB = 65500  # Megatron's writer uses int32 from this size on
_LOOKED_AT = 1 << 20  # index entries checked when a dataset is opened, in a few milliseconds
_PARTS = 16


@dataclass(frozen=True)
class Meta:
    """Contents of PREFIX.meta.json, which describes the .bin. `text_bytes` is the size of the UTF-8 text."""

    tokenizer: str  # fingerprint
    vocab_size: Annotated[int, Between(1, limits.VOCABULARY)]
    eod: Annotated[int, Between(0, limits.VOCABULARY)]
    documents: Count
    tokens: Count
    text_bytes: Count
    sha256: str


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype in which tokens of a vocabulary are stored and passed on: uint16 or int32, as in Megatron."""
    return np.dtype(DTYPES[8 if vocab_size < _UINT16_VOCAB else 4])


class IndexedDataset:
    """Memory-mapped reader of one dataset. Opening takes milliseconds and little memory at any size.

    `tokens` is all of .bin. `lengths` int32[S], `pointers` int64[S] and `document_indices` int64[D + 1] come from .idx,
    and so does `modes`, int8[S], in a multimodal Megatron dataset (else None). `meta` is None without a .meta.json,
    as in datasets written by Megatron.

    Opening compares the file sizes with .idx and checks the index, or evenly spaced parts of a large index.
    Raises ConfigError naming the file and the defect. `gptlite.satellites.data_tool.verify` checks the rest.
    """

    def __init__(self, prefix: Path):
        self.prefix = prefix
        self.bin, self.idx = sibling(prefix, ".bin"), sibling(prefix, ".idx")
        self.dtype, sequences, self._num_indices, has_modes = _read_header(self.idx)
        index = np.memmap(self.idx, dtype=np.uint8, mode="r", offset=HEADER.size)
        modes = 12 * sequences + 8 * self._num_indices
        # The int64 arrays need not be aligned: numpy reads them through an unaligned view.
        self.lengths = index[: 4 * sequences].view("<i4")
        self.pointers = index[4 * sequences : 12 * sequences].view("<i8")
        self.document_indices = index[12 * sequences : modes].view("<i8")
        self.modes = index[modes:].view("i1") if has_modes else None
        first, last = self.document_indices[0], self.document_indices[-1]
        if first != 0 or last != sequences:
            raise damaged(self.idx, f"its documents run from sequence {first} to {last}, not from 0 to {sequences}")
        for start, stop in _spaced(max(sequences, self.num_documents)):
            self.check_index(start, stop)
        self.tokens = self._map_tokens()
        self.meta = self._read_meta()

    @property
    def num_documents(self) -> int:
        """Number of documents, including empty ones."""
        return self._num_indices - 1

    def document_stops(self, start: int, stop: int) -> np.ndarray:
        """Return the end of documents [start, stop): the position after the last token of each, int64[stop - start]."""
        last = self.document_indices[start + 1 : stop + 1] - 1  # index of the last sequence so far; -1: none
        if not len(self.lengths):
            return np.zeros(len(last), dtype=np.int64)
        stops = self.pointers[last] // self.dtype.itemsize + self.lengths[last]
        return np.where(last < 0, 0, stops)

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of one document with its `eod`. Raises IndexError outside range(num_documents)."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        start = self.document_stops(index - 1, index)[0] if index else 0
        return self.tokens[start : self.document_stops(index, index + 1)[0]]

    def check_index(self, start: int, stop: int) -> None:
        """Raise ConfigError unless the sequences and documents from `start` to `stop` are contiguous and in order."""
        lengths, pointers = self.lengths[start : stop + 1], self.pointers[start : stop + 1]
        if lengths.size and (worst := int(lengths.argmin())) >= 0 > lengths[worst]:
            raise damaged(self.idx, f"the length of sequence {start + worst} is {lengths[worst]}")
        if lengths.size and start == 0 and pointers[0] != 0:
            raise damaged(self.idx, f"the first sequence starts at byte {pointers[0]}, not 0")
        ends = pointers[:-1] + lengths[:-1].astype(np.int64) * self.dtype.itemsize
        if (wrong := np.flatnonzero(pointers[1:] != ends)).size:
            n = int(wrong[0])
            fault = f"sequence {start + n + 1} starts at byte {pointers[n + 1]}, but the previous one ends at {ends[n]}"
            raise damaged(self.idx, fault)
        indices = self.document_indices[start : stop + 1]
        if (wrong := np.flatnonzero(indices[1:] < indices[:-1])).size:
            n = int(wrong[0])
            fault = f"document {start + n} starts at sequence {indices[n]}, but ends before sequence {indices[n + 1]}"
            raise damaged(self.idx, fault)

    def _map_tokens(self) -> np.ndarray:
        size, sequences = file_size(self.bin), len(self.lengths)
        expected = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if sequences else 0
        if size != expected:
            raise damaged(self.bin, f"it has {size} bytes, but its .idx requires {expected}")
        return np.memmap(self.bin, dtype=self.dtype, mode="r") if size else np.empty(0, dtype=self.dtype)

    def _read_meta(self) -> Meta | None:
        path = sibling(self.prefix, ".meta.json")
        if not path.exists():
            return None
        try:
            meta = read_json(path, Meta)
        except OSError as error:
            raise ConfigError(f"cannot read {system_error(error)}") from error
        except ValueError as error:
            raise damaged(path, f"it cannot be read: {error}") from error
        if meta.tokens != len(self.tokens) or meta.documents != self.num_documents:
            counted = f"{len(self.tokens)} tokens in {self.num_documents} documents"
            raise damaged(path, f"it gives {meta.tokens} tokens in {meta.documents} documents, but there are {counted}")
        return meta


def _read_header(path: Path) -> tuple[np.dtype, int, int, bool]:
    """Return the dtype of the tokens, S, D (see the module), and True if the file has modes."""
    size = file_size(path)
    with open_regular(path) as file:
        raw = file.read(HEADER.size)
    if len(raw) < HEADER.size or not raw.startswith(MAGIC):
        raise damaged(path, f"it does not begin with {MAGIC!r}")
    _, version, code, sequences, indices = HEADER.unpack(raw)
    if version != VERSION:
        raise damaged(path, f"its version is {version}, not {VERSION}")
    if code not in DTYPES:
        what = f"its dtype code is {code}, " + ("a floating-point type" if code in (6, 7) else "which is unknown")
        raise damaged(path, f"{what}; the codes for tokens are {', '.join(map(str, DTYPES))}")
    expected = HEADER.size + 12 * sequences + 8 * indices
    if indices < 1 or size not in (expected, expected + sequences):  # multimodal datasets add one int8 per sequence
        words = f"{sequences} sequences and {indices} document indices need {expected}"
        raise damaged(path, f"it has {size} bytes, but {words}")
    return np.dtype(DTYPES[code]), sequences, indices, size > expected


def _spaced(count: int) -> list[tuple[int, int]]:
    """Return the (start, stop) ranges to check: all of range(count), or `_PARTS` evenly spaced parts if it is long."""
    if count <= _LOOKED_AT:
        return [(0, count)]
    size = -(-_LOOKED_AT // _PARTS)
    starts = [n * (count - size) // (_PARTS - 1) for n in range(_PARTS)]
    return [(start, start + size) for start in starts]


def sibling(prefix: Path, suffix: str) -> Path:
    """Return the file of a dataset with this suffix, such as `.bin`."""
    return prefix.with_name(prefix.name + suffix)


def outside(ids: np.ndarray, vocab_size: int) -> int | None:
    """Return the position of the first id of int[N] that is not in range(vocab_size), or None."""
    if not ids.size or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        return None
    return int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])


def file_size(path: Path) -> int:
    """Return the size of a file in bytes. Raises ConfigError if it is missing or not a regular file."""
    try:
        status = path.stat()
    except OSError as error:
        raise damaged(path, f"it cannot be opened ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode):  # a pipe would never end
        raise damaged(path, "it is not a regular file")
    return status.st_size


def damaged(path: Path, what: str) -> ConfigError:
    """Return the ConfigError for a damaged file, with the damage `what` and the fix."""
    cached = (path.parent / "key.json").exists()
    return ConfigError(
        f"{path} is damaged: {what}; "
        + ("delete its folder to prepare it again" if cached else "copy or write it again")
    )
