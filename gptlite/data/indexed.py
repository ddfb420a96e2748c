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

import hashlib
import json
import os
import stat
import struct
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

import numpy as np

from gptlite import limits
from gptlite.documents import Between, Count, read_json
from gptlite.errors import ConfigError, system_error
from gptlite.files import open_regular, sync_folder, write_synced
from gptlite.progress import Progress

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats, never tokens
_HEADER = struct.Struct("<9sQBQQ")
_UINT16_VOCAB = 65500  # Megatron's writer uses int32 from this size on
_MAX_SEQUENCE = 2**31 - 1  # lengths are int32
_BLOCK = 8 << 20  # bytes read at a time
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


class IndexedWriter:
    """Context manager that writes one dataset. Documents are added one or many at a time.

    The files have temporary names until the block succeeds. The .idx gets its final name last, so a reader never sees
    an incomplete dataset. If the block raises, the files are removed. Each document takes 4 bytes of memory.

    With `lengths`, the path of a file of sequence lengths, the files have their final names from the start, and are
    kept if the block raises or the process is killed. A new writer with the same arguments can resume with `go_on`.
    """

    def __init__(self, prefix: Path, tokenizer: str, vocab_size: int, eod: int, lengths: Path | None = None):
        self._prefix = prefix
        self.dtype = token_dtype(vocab_size)
        self._dtype_code = next(code for code, name in DTYPES.items() if self.dtype == name)
        self._about = tokenizer, vocab_size, eod  # as in Meta
        self._vocab_size, self._eod = vocab_size, eod
        self.num_documents = 0  # written so far
        self._lengths = array("i")  # tokens of each sequence; negative if its document continues in the next one
        self._length = 0  # tokens of the open sequence
        self._tokens = 0
        self._text_bytes = 0
        self._hash = hashlib.sha256()
        self._saved = 0  # sequences already in the file `lengths`
        prefix.parent.mkdir(parents=True, exist_ok=True)
        # Prefix of the files while they are being written.
        self._open = prefix if lengths else prefix.with_name(f".tmp-{os.getpid()}-{prefix.name}")
        self._bin = open(_path(self._open, ".bin"), "a+b" if lengths else "wb")  # noqa: SIM115
        self._index = lengths and open(lengths, "a+b")  # noqa: SIM115

    def write(self, tokens: Sequence[int] | np.ndarray, text_bytes: int) -> None:
        """Add tokens, which encode `text_bytes` bytes, to the open document.

        Raises ValueError for ids outside the vocabulary.
        """
        ids = self._checked(tokens)
        if self._length + ids.size > _MAX_SEQUENCE:
            self._lengths.append(-self._length)  # negative: the document continues in the next sequence
            self._length = 0
        self._append(ids.astype(self.dtype).tobytes())
        self._length += ids.size
        self._text_bytes += text_bytes

    def end_document(self) -> None:
        """Close the open document with `eod`."""
        self.write([self._eod], text_bytes=0)
        self._lengths.append(self._length)
        self._length = 0
        self.num_documents += 1

    def write_documents(self, tokens: np.ndarray, lengths: np.ndarray, text_bytes: int) -> None:
        """Add whole documents: concatenated tokens, int[N], and the length of each, including its `eod`, int[D].

        Raises ValueError for ids outside the vocabulary, lengths that do not sum to N, or a document without `eod`.
        """
        self._require_ended()
        ids, lengths = self._checked(tokens), np.asarray(lengths, dtype=np.int64)
        if lengths.size and not 1 <= lengths.min() <= lengths.max() <= _MAX_SEQUENCE:
            raise ValueError(f"documents have {lengths.min()} to {lengths.max()} tokens, not 1 to {_MAX_SEQUENCE}")
        ends = np.cumsum(lengths)
        if ids.size != (ends[-1] if ends.size else 0) or (ids[ends - 1] != self._eod).any():
            raise ValueError(f"the lengths of {lengths.size} documents do not sum to {ids.size}, or one lacks its eod")
        self._append(ids.astype(self.dtype, copy=False).tobytes())
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        self.num_documents += lengths.size
        self._text_bytes += text_bytes

    def save(self) -> Meta:
        """Sync all documents to disk and return their totals for `go_on`. Raises OSError if the disk is full."""
        self._require_ended()
        assert self._index
        self._index.write(self._lengths[self._saved :].tobytes())
        self._saved = len(self._lengths)
        for file in (self._bin, self._index):
            file.flush()
            os.fsync(file.fileno())
        return self._meta()

    def go_on(self, saved: Meta, progress: Progress) -> None:
        """Resume from the `save` that returned `saved`; drop later data. Raises ConfigError if the files changed."""
        assert self._index
        self._bin.seek(0)
        left = saved.tokens * self.dtype.itemsize
        while left and (block := self._bin.read(min(left, _BLOCK))):
            self._count(block)
            left -= len(block)
            progress.add(len(block))
        self._index.seek(0)
        data = self._index.read()
        lengths = np.frombuffer(data, np.int32, len(data) // 4)  # a full disk may have truncated the last length
        ends = np.flatnonzero(lengths > 0)[: saved.documents]
        self._lengths.frombytes(lengths[: ends[-1] + 1 if ends.size else 0].tobytes())
        self.num_documents, self._text_bytes, self._saved = ends.size, saved.text_bytes, len(self._lengths)
        if self._meta() != saved or np.abs(self._lengths).sum(dtype=np.int64) != saved.tokens:
            work = Path(self._index.name).parent
            raise ConfigError(f"{self._bin.name} has changed since it was written; remove {work} to start over")
        self._bin.truncate(self._tokens * self.dtype.itemsize)  # documents after the last save are written again
        self._index.truncate(4 * self._saved)

    def _require_ended(self) -> None:
        if self._length:
            raise ValueError(f"{self._prefix}: a document is open; end it first")

    def _checked(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the ids as an integer array. Raises ValueError for unknown ids, which a cast could wrap around."""
        ids = np.asarray(tokens)
        if not ids.size:
            return ids.astype(self.dtype)
        if ids.dtype.kind not in "iu":
            raise ValueError(f"tokens are integers, not {ids.dtype}")
        if (place := outside(ids, self._vocab_size)) is not None:
            raise ValueError(f"token outside the vocabulary of {self._vocab_size}: {ids[place]}")
        return ids

    def _append(self, data: bytes) -> None:
        self._bin.write(data)
        self._count(data)

    def _count(self, data: bytes) -> None:
        self._hash.update(data)
        self._tokens += len(data) // self.dtype.itemsize

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._bin.close()
            if self._index:
                self._index.close()
            for suffix in (".bin", ".meta.json", ".idx") if self._open != self._prefix else ():
                _path(self._open, suffix).unlink(missing_ok=True)

    def _commit(self) -> None:
        self._require_ended()
        self._bin.flush()
        os.fsync(self._bin.fileno())
        write_synced(_path(self._open, ".meta.json"), json.dumps(asdict(self._meta()), indent=2) + "\n")
        with open(_path(self._open, ".idx"), "wb") as file:
            self._write_index(file)
            file.flush()
            os.fsync(file.fileno())
        for suffix in (".bin", ".meta.json", ".idx"):
            os.replace(_path(self._open, suffix), _path(self._prefix, suffix))  # .idx last: readers open it first
        sync_folder(self._prefix.parent)

    def _meta(self) -> Meta:
        counts = self.num_documents, self._tokens, self._text_bytes
        return Meta(*self._about, *counts, sha256=self._hash.hexdigest())

    def _write_index(self, file: BinaryIO) -> None:
        signed = np.frombuffer(self._lengths, np.int32)
        lengths = np.abs(signed).astype("<i4")
        pointers = np.zeros(len(lengths), dtype="<i8")  # int64, as .bin may exceed 2 GiB
        np.cumsum(lengths[:-1].astype("<i8") * self.dtype.itemsize, out=pointers[1:])
        documents = np.concatenate([[0], np.flatnonzero(signed > 0) + 1]).astype("<i8")
        file.write(_HEADER.pack(MAGIC, VERSION, self._dtype_code, len(lengths), len(documents)))
        for part in (lengths, pointers, documents):
            file.write(part.data)


class IndexedDataset:
    """Memory-mapped reader of one dataset. Opening takes milliseconds and little memory at any size.

    `tokens` is all of .bin. `lengths` int32[S], `pointers` int64[S] and `document_indices` int64[D + 1] come from .idx,
    and so does `modes`, int8[S], in a multimodal Megatron dataset (else None). `meta` is None without a .meta.json,
    as in datasets written by Megatron.

    Opening compares the file sizes with .idx and checks the index, or evenly spaced parts of a large index.
    Raises ConfigError naming the file and the defect. `gptlite.data_tool.verify` checks the rest.
    """

    def __init__(self, prefix: Path):
        self.prefix = prefix
        self.bin, self.idx = _path(prefix, ".bin"), _path(prefix, ".idx")
        self.dtype, sequences, self._num_indices, has_modes = _read_header(self.idx)
        index = np.memmap(self.idx, dtype=np.uint8, mode="r", offset=_HEADER.size)
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
        path = _path(self.prefix, ".meta.json")
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
        raw = file.read(_HEADER.size)
    if len(raw) < _HEADER.size or not raw.startswith(MAGIC):
        raise damaged(path, f"it does not begin with {MAGIC!r}")
    _, version, code, sequences, indices = _HEADER.unpack(raw)
    if version != VERSION:
        raise damaged(path, f"its version is {version}, not {VERSION}")
    if code not in DTYPES:
        what = f"its dtype code is {code}, " + ("a floating-point type" if code in (6, 7) else "which is unknown")
        raise damaged(path, f"{what}; the codes for tokens are {', '.join(map(str, DTYPES))}")
    expected = _HEADER.size + 12 * sequences + 8 * indices
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


def _path(prefix: Path, suffix: str) -> Path:
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
