"""Conversion of a block to documents and tokens, run in the worker processes."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gptlite.data.indexed import token_dtype
from gptlite.satellites.corpus.cuts import encode_after
from gptlite.satellites.corpus.write import document_hash, is_held_out
from gptlite.satellites.preprocess.blocks import BLANK_LINES, Cutting, InputBlock
from gptlite.satellites.preprocess.pieces import Piece
from gptlite.tokenizers.base import load_tokenizer

_BLANK = re.compile(rb"\n(?:[ \t\r]*\n)+")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Document:
    """Text of a document, and its UTF-8 bytes. If it is longer than a block, both hold only the part in this block."""

    text: str
    data: bytes


@dataclass(frozen=True)
class Bad:
    """Invalid record: index of its source, its line or row (from 1), and the reason."""

    source: int
    line: int
    reason: str


def documents(block: InputBlock, formats: list[str], cutting: Cutting) -> Iterator[tuple[Piece, Document | Bad]]:
    """Yield each document or bad record with its piece, in order. Empty documents are included, blank lines are not.

    `formats` are the formats of all sources, in their order.
    """
    for piece in block.pieces:
        for line, at, record in _records(piece, formats[piece.source], cutting):
            try:
                yield piece, _document(record, formats[piece.source], cutting)
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start)
                byte = f"0x{error.object[error.start]:02x}"
                yield piece, Bad(piece.source, line, f"it is not UTF-8 at byte {at + error.start} ({byte})")
            except UnicodeEncodeError:
                yield piece, Bad(piece.source, line, "it has half of a surrogate pair, which is not valid text")
            except json.JSONDecodeError as error:
                yield piece, Bad(piece.source, line, f"it is not JSON: {error.msg} at column {error.colno}")
            except RecursionError:
                yield piece, Bad(piece.source, line, "its JSON is nested too deeply")
            except ValueError as error:
                yield piece, Bad(piece.source, line, str(error))
        if piece.damage:
            yield piece, Bad(piece.source, piece.line, piece.damage)


def _document(record: bytes | None, format: str, cutting: Cutting) -> Document:
    """Return the document of a record. Raises ValueError if it is not valid text."""
    if record is None:
        raise ValueError(f"its {cutting.column} is null")
    if len(record) > cutting.max_record_bytes:
        raise ValueError(f"it is longer than max_record_bytes={cutting.max_record_bytes}")
    text = record.decode("utf-8")
    if format != "jsonl":
        return Document(text, record)
    text = _value(json.loads(text), cutting.column)
    return Document(text, text.encode("utf-8"))


def _value(record: Any, name: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"it is a JSON {_type(record)}, not an object")
    if name not in record:
        found = ", ".join(list(record)[:8]) or "none"
        raise ValueError(f"it has no field {name}; its fields: {found}")
    if not isinstance(record[name], str):
        raise ValueError(f"its field {name} is a {_type(record[name])}, not a string")
    return record[name]


def _type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _records(piece: Piece, format: str, cutting: Cutting) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield (line or Parquet row, start, record without its separator). The record is None for a Parquet null.

    The start is the record's position in a text file in bytes; 0 for a row and a line of JSON, which are counted.
    """
    if not isinstance(piece.data, bytes):
        for row, record in enumerate(piece.data, piece.line):
            yield row, 0, record
        return
    data = piece.data.removeprefix(_BOM) if piece.line == 1 else piece.data
    start = piece.start + len(piece.data) - len(data)
    if format == "jsonl":
        for line, record in enumerate(data.split(b"\n"), piece.line):
            if record and not record.isspace():
                yield line, 0, record
    elif piece.whole:
        yield piece.line, start, data
    elif data:
        for line, at, record in _texts(data, piece.line, cutting.separator):
            yield line, start + at, record


def _texts(data: bytes, line: int, separator: str) -> Iterator[tuple[int, int, bytes]]:
    ends = list(_BLANK.finditer(data) if separator == BLANK_LINES else re.finditer(re.escape(separator.encode()), data))
    start = 0
    for stop, after in [*((each.start(), each.end()) for each in ends), (len(data), len(data))]:
        record = data[start:stop]
        if separator == BLANK_LINES:
            record = record.strip(b"\r\n")
        if record or stop < len(data):
            yield line, data.index(record, start), record
        line += data.count(b"\n", start, after)
        start = after


@dataclass
class Split:
    """Whole documents: concatenated tokens with an `eod` after each document, their lengths, and the bytes of text."""

    tokens: np.ndarray
    lengths: np.ndarray
    text_bytes: int


@dataclass
class Encoded:
    """Result of a block: training and held-out documents, bad records, and the number of empty documents.

    If the block is a part of a long document, `part` holds its tokens, without `eod`.
    """

    splits: tuple[Split, Split]
    bad: list[Bad] = field(default_factory=list)
    empty: int = 0
    part: Split | None = None


class Encoder:
    """Callable that tokenizes the documents of a block. A hash of a document's text decides whether it is held out."""

    def __init__(self, folder: Path, formats: list[str], cutting: Cutting, validation_fraction: float):
        """Load the tokenizer that was saved in `folder`."""
        self._tokenizer = load_tokenizer(folder)
        self._formats, self._cutting, self._fraction = formats, cutting, validation_fraction
        self._dtype = token_dtype(self._tokenizer.vocab_size)  # in which `Output` reads the parts
        self._eod = np.array([self._tokenizer.eod], dtype=np.int32)

    def __call__(self, block: InputBlock) -> Encoded:
        """Encode all non-empty documents of a block."""
        parts: tuple[list[np.ndarray], ...] = ([], [])
        text_bytes, empty = [0, 0], 0
        bad: list[Bad] = []
        long: Split | None = None
        for piece, document in documents(block, self._formats, self._cutting):
            if isinstance(document, Bad):
                bad.append(document)
                continue
            if piece is block.part:
                ids = encode_after(self._tokenizer, piece.context, document.text)
                long = Split(ids.astype(self._dtype), np.array([ids.size]), len(document.data))
                continue
            if not document.data:
                empty += 1
                continue
            digest = piece.digest or document_hash(document.data).digest()
            split = is_held_out(digest, self._fraction)
            parts[split].extend((self._tokenizer.encode_array(document.text), self._eod))
            text_bytes[split] += len(document.data)
        splits = self._joined(parts[0], text_bytes[0]), self._joined(parts[1], text_bytes[1])
        return Encoded(splits, bad, empty, long)

    def _joined(self, parts: list[np.ndarray], text_bytes: int) -> Split:
        lengths = np.array([ids.size + 1 for ids in parts[::2]], dtype=np.int32)
        tokens = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
        return Split(tokens.astype(self._dtype), lengths, text_bytes)
