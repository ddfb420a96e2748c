"""Parts of the input: positions in it, and the records between two positions."""

from dataclasses import dataclass

from gptlite.documents import Count


@dataclass(frozen=True)
class InputPlace:
    """Position in the input: index of the source, `offset` in decompressed bytes (rows for Parquet), line from 1.

    `digest` is the hash of standard input up to here. A resumed run compares it to detect different input.
    """

    source: Count = 0
    offset: Count = 0
    line: Count = 1
    digest: str = ""


@dataclass
class Piece:
    """Records of one source, from `line` on. `data` holds whole records with their separators; for Parquet, rows.

    A `whole` piece is one document, or a part of a long one if it is not the `first` part or has `more` after it. Its
    `digest` is the hash of the document up to the end of the piece, and `context` is the text before it, as
    `encode_after` needs it. `damage` is the reason why data after these records was left out. `start` is the position
    of `data` in the source, in decompressed bytes.
    """

    source: int
    line: int
    data: bytes | list[bytes | None]
    whole: bool = False
    first: bool = True
    more: bool = False
    digest: bytes | None = None
    context: str = ""
    damage: str = ""
    start: int = 0
