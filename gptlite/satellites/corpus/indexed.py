"""Writing of Megatron's indexed datasets; gptlite/data/indexed.py describes the format and reads it."""

import hashlib
import json
import os
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gptlite.data.indexed import DTYPES, HEADER, MAGIC, VERSION, Meta, outside, sibling, token_dtype
from gptlite.errors import ConfigError
from gptlite.files import sync_folder, write_synced
from gptlite.progress import Progress

_MAX_SEQUENCE = 2**31 - 1  # lengths are int32
_BLOCK = 8 << 20  # bytes read at a time


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
        self._bin = open(sibling(self._open, ".bin"), "a+b" if lengths else "wb")  # noqa: SIM115
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
                sibling(self._open, suffix).unlink(missing_ok=True)

    def _commit(self) -> None:
        self._require_ended()
        self._bin.flush()
        os.fsync(self._bin.fileno())
        write_synced(sibling(self._open, ".meta.json"), json.dumps(asdict(self._meta()), indent=2) + "\n")
        with open(sibling(self._open, ".idx"), "wb") as file:
            self._write_index(file)
            file.flush()
            os.fsync(file.fileno())
        for suffix in (".bin", ".meta.json", ".idx"):
            os.replace(sibling(self._open, suffix), sibling(self._prefix, suffix))  # .idx last: readers open it first
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
        file.write(HEADER.pack(MAGIC, VERSION, self._dtype_code, len(lengths), len(documents)))
        for part in (lengths, pointers, documents):
            file.write(part.data)
