"""Division of sources into blocks of about a megabyte, at record boundaries. A worker tokenizes one block at a time.

A block depends only on where it starts, so reading can resume at the end of any block.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from gptlite.errors import ConfigError
from gptlite.satellites.corpus.cuts import WINDOW, context_before, last_cut
from gptlite.satellites.corpus.write import document_hash
from gptlite.satellites.preprocess.inputs import STDIN, Source
from gptlite.satellites.preprocess.parquet import parquet_pieces
from gptlite.satellites.preprocess.pieces import InputPlace, Piece
from gptlite.satellites.preprocess.streams import DamagedInput, Stream
from gptlite.tokenizers.base import Tokenizer

BLOCK = 1 << 20  # bytes
_PART = 8 << 20  # bytes; a longer text file without separator is read in parts of about this size
BLANK_LINES = "blank"  # separator=blank


@dataclass
class InputBlock:
    """Pieces, the place `after` them, and the bytes `read` so far from all sources, counted before decompression."""

    pieces: list[Piece] = field(default_factory=list)
    after: InputPlace = field(default_factory=InputPlace)
    read: int = 0

    @property
    def size(self) -> int:
        """Number of bytes in all pieces, including separators and markup."""
        parts = ([piece.data] if isinstance(piece.data, bytes) else piece.data for piece in self.pieces)
        return sum(len(record or b"") for part in parts for record in part)

    @property
    def part(self) -> Piece | None:
        """Piece that is part of a long document and alone in this block; None in a block of whole documents."""
        piece = self.pieces[0] if self.pieces else None
        return piece if piece is not None and piece.whole and (piece.more or not piece.first) else None


@dataclass(frozen=True)
class Cutting:
    """Rules for cutting sources into records. `column` is the JSON field or Parquet column; text has a `separator`."""

    column: str = "text"
    separator: str = ""
    max_record_bytes: int = 128 << 20


def read_blocks(
    sources: list[Source], cutting: Cutting, start: InputPlace, tokenizer: Tokenizer
) -> Iterator[InputBlock]:
    """Yield all blocks from `start` on. The parts of a long document have the same tokens as the whole document.

    Raises ConfigError for an unreadable file, or changed standard input.
    """
    before = sum(source.size for source in sources[: start.source])
    block = InputBlock()
    for number in range(start.source, len(sources)):
        source = sources[number]
        place = start if number == start.source else InputPlace(number)
        for piece, after, read in _pieces(source, place, cutting, tokenizer):
            alone = piece.more or not piece.first
            if alone and block.pieces:
                yield block
                block = InputBlock()
            block.pieces.append(piece)
            block.after, block.read = after, before + read
            if alone or block.size >= BLOCK // 2:
                yield block
                block = InputBlock()
        before += source.size
        block.after, block.read = InputPlace(number + 1), before
        if len(block.pieces) >= 4096:  # bounds a block of many small files
            yield block
            block = InputBlock()
    yield block


def _pieces(
    source: Source, place: InputPlace, cutting: Cutting, tokenizer: Tokenizer
) -> Iterator[tuple[Piece, InputPlace, int]]:
    """Yield pieces of a source, each with the place after it and the bytes read. A last piece reports any damage."""
    at = place
    try:
        if source.format == "parquet":
            pieces = parquet_pieces(source, place, cutting.column)
        elif source.format == "text" and not cutting.separator:
            pieces = _document(source, place, cutting.max_record_bytes, tokenizer)
        else:
            pieces = _Records(source, place, cutting).pieces()
        for piece, after, read in pieces:
            yield piece, after, read
            at = after
    except OSError as error:
        raise ConfigError(f"input: {source.path} cannot be read ({error.strerror or error})") from error
    except DamagedInput as error:
        piece = Piece(place.source, at.line, b"", damage=str(error))
        yield piece, InputPlace(place.source + 1), source.size


class _Records:
    """Reader of records that are ended by a separator: lines of JSON, or documents of text."""

    def __init__(self, source: Source, place: InputPlace, cutting: Cutting):
        self._number, self._offset, self._line = place.source, place.offset, place.line
        self._longest = cutting.max_record_bytes
        if source.format == "jsonl":
            self._ends: tuple[bytes, ...] = (b"\n",)
        elif cutting.separator == BLANK_LINES:
            self._ends = (b"\n\n", b"\n\r\n")
        else:
            self._ends = (cutting.separator.encode(),)
        self._hash = hashlib.blake2b(digest_size=16) if source.path == STDIN else None
        self._stream = Stream(source.path, 0 if self._hash else place.offset)
        if self._hash is not None:
            self._hear_again(place)

    def pieces(self) -> Iterator[tuple[Piece, InputPlace, int]]:
        """Yield each piece with the place after it and the bytes read so far."""
        data = bytearray()
        while True:
            data += self._stream.read(BLOCK - len(data))
            ended, line, too_long = len(data) < BLOCK, self._line, ""
            stop = len(data) if ended and not self._stream.damage else self._last_end(data)
            if not stop and not ended:
                stop, too_long = self._lengthen(data)
            if stop:
                found = b"" if too_long else bytes(data[:stop])
                piece = Piece(self._number, line, found, damage=too_long, start=self._offset)
                self._pass(data, stop)
                yield piece, self._place(), self._stream.raw_position
            if ended or not stop:
                break
        self._stream.close()
        if self._stream.damage:
            raise DamagedInput(self._stream.damage)

    def _last_end(self, data: bytearray) -> int:
        return max(data.rfind(end) + len(end) if end in data else 0 for end in self._ends)

    def _first_end(self, data: bytearray, start: int) -> int:
        found = [(data.find(end, max(0, start - len(end) + 1)), len(end)) for end in self._ends]
        return min((at + length for at, length in found if at >= 0), default=0)

    def _lengthen(self, data: bytearray) -> tuple[int, str]:
        """Read to the end of a record longer than a block. Return where it ends in `data`, and an error or "".

        The end is 0 if the stream is damaged. The start of a record longer than max_record_bytes is dropped from
        memory.
        """
        too_long, keep = "", max(map(len, self._ends)) - 1
        while True:
            size = len(data)
            data += self._stream.read(BLOCK)
            if stop := self._first_end(data, size):
                return stop, too_long
            if len(data) == size:
                return (size if too_long or not self._stream.damage else 0), too_long
            if too_long or len(data) > self._longest:
                too_long = f"it is longer than max_record_bytes={self._longest}"
                self._pass(data, len(data) - keep)

    def _pass(self, data: bytearray, size: int) -> None:
        """Remove the first `size` bytes, which were processed, from `data`, and advance the place past them."""
        self._offset += size
        self._line += data.count(b"\n", 0, size)
        if self._hash is not None:
            self._hash.update(data[:size])
        del data[:size]

    def _place(self) -> InputPlace:
        return InputPlace(self._number, self._offset, self._line, self._hash.hexdigest() if self._hash else "")

    def _hear_again(self, place: InputPlace) -> None:
        """Read standard input up to `place` again. Raises ConfigError if the interrupted run read other data."""
        assert self._hash is not None
        left = place.offset
        while left and (data := self._stream.read(min(left, BLOCK))):
            self._hash.update(data)
            left -= len(data)
        if place.offset and self._hash.hexdigest() != place.digest:
            raise ConfigError(
                "input=- differs from the input of the interrupted run; give that input, or overwrite=true"
            )


def _document(
    source: Source, place: InputPlace, longest: int, tokenizer: Tokenizer
) -> Iterator[tuple[Piece, InputPlace, int]]:
    """Yield a text file that is one document. A long one is divided into parts, where this does not change tokens."""
    stream, digest, line = Stream(source.path), document_hash(), 1
    data, first, start, context, size = bytearray(), True, 0, "", _PART
    while True:
        data += stream.read(size + WINDOW - len(data))
        if stream.damage:
            raise DamagedInput(stream.damage)
        more = len(data) == size + WINDOW
        stop = last_cut(tokenizer, data, size) if more else len(data)
        if not stop and more:  # the part grows, until it has a place for a cut
            size += _PART
            if size > longest:
                raise DamagedInput(f"it cannot be cut within max_record_bytes={longest} without a change of its tokens")
            continue
        digest.update(data[:stop])
        whole = {"whole": True, "first": first, "more": more, "digest": digest.digest(), "context": context}
        piece = Piece(place.source, line, bytes(data[:stop]), start=start, **whole)
        yield piece, InputPlace(place.source + 1), stream.raw_position
        if not more:
            break
        line += data.count(b"\n", 0, stop)
        first, start, context, size = False, start + stop, context_before(data, stop), _PART
        del data[:stop]
    stream.close()
