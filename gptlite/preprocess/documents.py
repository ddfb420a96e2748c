"""Documents of a block: what is text in it, and what is not."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gptlite.preprocess.blocks import BLANK_LINES, Block, Cutting, Piece

_BLANK = re.compile(rb"\n(?:[ \t\r]*\n)+")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Document:
    """One text and its UTF-8; of a long one, the part that is in this block."""

    text: str
    data: bytes


@dataclass(frozen=True)
class Bad:
    """A record that is no text: source, line or row from 1, and why."""

    source: int
    line: int
    reason: str


def documents(block: Block, formats: list[str], cutting: Cutting) -> Iterator[tuple[Piece, Document | Bad]]:
    """Documents and bad records in order; empty documents are among them, empty lines of JSON are not.

    `formats` are those of the sources.
    """
    for piece in block.pieces:
        for line, record in _records(piece, formats[piece.source], cutting):
            try:
                yield piece, _document(record, formats[piece.source], cutting)
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start)
                byte = f"0x{error.object[error.start]:02x}"
                yield piece, Bad(piece.source, line, f"it is not UTF-8 at byte {error.start} ({byte})")
            except UnicodeEncodeError:
                yield piece, Bad(piece.source, line, "it has half of a surrogate pair, which is no text")
            except json.JSONDecodeError as error:
                yield piece, Bad(piece.source, line, f"it is not JSON: {error.msg} at column {error.colno}")
            except RecursionError:
                yield piece, Bad(piece.source, line, "its JSON is nested too deep")
            except ValueError as error:
                yield piece, Bad(piece.source, line, str(error))
        if piece.damage:
            yield piece, Bad(piece.source, piece.line, piece.damage)


def _document(record: bytes | None, format: str, cutting: Cutting) -> Document:
    """Raises ValueError for what is no text."""
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


def _records(piece: Piece, format: str, cutting: Cutting) -> Iterator[tuple[int, bytes | None]]:
    """Each record without its separator, with its line, or its row of Parquet; None for a null."""
    if piece.lengths is not None:
        yield from _rows(piece)
        return
    data = piece.data.removeprefix(_BOM) if piece.line == 1 else piece.data
    if format == "jsonl":
        for line, record in enumerate(data.split(b"\n"), piece.line):
            if record and not record.isspace():
                yield line, record
    elif piece.whole:
        yield piece.line, data
    elif data:
        yield from _texts(data, piece.line, cutting.separator)


def _rows(piece: Piece) -> Iterator[tuple[int, bytes | None]]:
    start = 0
    assert piece.lengths is not None
    for row, length in enumerate(piece.lengths, piece.line):
        stop = start + max(length, 0)
        yield row, piece.data[start:stop] if length >= 0 else None
        start = stop


def _texts(data: bytes, line: int, separator: str) -> Iterator[tuple[int, bytes]]:
    ends = list(_BLANK.finditer(data) if separator == BLANK_LINES else re.finditer(re.escape(separator.encode()), data))
    start = 0
    for stop, after in [*((each.start(), each.end()) for each in ends), (len(data), len(data))]:
        record = data[start:stop]
        if separator == BLANK_LINES:
            record = record.strip(b"\r\n")
        if record or stop < len(data):
            yield line, record
        line += data.count(b"\n", start, after)
        start = after
