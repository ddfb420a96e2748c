"""Plain text on disk: which files, whether they are UTF-8, and where each is cut for validation."""

import codecs
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gptlite.errors import ConfigError
from gptlite.invocation import command
from gptlite.progress import Log, Progress

_BLOCK = 1 << 20  # bytes read at a time
_NEWLINE_WITHIN = 1 << 16  # bytes a cut may move to fall between two lines
_RECORDS = {".jsonl", ".ndjson", ".json", ".parquet", ".pq", ".gz", ".zst", ".xz", ".bz2"}  # what preprocess reads


@dataclass(frozen=True)
class Span:
    """Bytes [start, stop) of a file, cut between characters."""

    path: Path
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self.stop - self.start

    def blocks(self) -> Iterator[str]:
        """The text, in pieces of whole lines of about a megabyte."""
        with _reading(self.path) as file:
            file.seek(self.start)
            while (left := self.stop - file.tell()) > 0:
                block = file.read(min(_BLOCK, left))
                block += file.readline(left - len(block)) if left > len(block) else b""
                if not block:
                    raise ConfigError(f"data.path: {self.path} became shorter while it was read; start again")
                yield block.decode("utf-8")


def find_files(path: str) -> list[Path]:
    """The file at `path`, or all *.txt below it in order of name. ConfigError if there is nothing to read."""
    root = Path(path).expanduser()
    refuse_records(path)
    if not path.strip() or not root.exists():
        raise ConfigError(f"data.path={path} does not exist; give a text file or a folder of .txt files")
    found = sorted(root.rglob("*.txt")) if root.is_dir() else [root]
    for file in found:
        refuse_broken_link("data.path", file)
    files = [file for file in found if file.is_file()] if root.is_dir() else found
    if not files or not files[0].is_file():  # nothing, or a device or pipe that never ends
        raise ConfigError(f"data.path={path} holds no .txt files; give a text file or a folder of .txt files")
    return files


def refuse_records(path: str) -> None:
    """Raises ConfigError for a file of records or a compressed one: its braces and field names are no text."""
    if Path(path).suffix.lower() in _RECORDS and not Path(path).expanduser().is_dir():
        raise ConfigError(
            f"data.path={path} is records or compressed, not plain text; tokenize it: {command('preprocess')} "
            f"input={path} tokenizer=... output=data/mine, and train with data=mine; or name it .txt if it is text"
        )


def refuse_broken_link(key: str, path: Path) -> None:
    """Raises ConfigError for a link that leads nowhere: is_file is false of it, so a folder would lose it unnoticed."""
    if path.is_symlink() and not path.exists():
        raise ConfigError(f"{key}: {path} is a link to {os.readlink(path)}, which leads nowhere; repair or remove it")


def scan(files: list[Path], log: Log = print) -> str:
    """SHA-256 of the files' contents, in order.

    Raises ConfigError naming the file and the byte where one is not UTF-8, or if there is nothing but white space.
    """
    digest = hashlib.sha256()
    blank = True
    progress = Progress("reading", sum(file.stat().st_size for file in files), log)

    def count(block: bytes) -> None:
        digest.update(block)
        progress.add(len(block))

    for path in files:
        digest.update(path.stat().st_size.to_bytes(8, "little"))  # so that moving text between files counts
        for block in _decoded_blocks(path, count):
            blank = blank and not block.strip()
    if blank:
        raise ConfigError(f"data.path: {_names(files)} has no text in it; give a file that has")
    return digest.hexdigest()


def split(path: Path, validation_fraction: float) -> tuple[Span, Span]:
    """The training part of a file and the held-out part, its end. The cut falls after a line where one ends nearby."""
    with _reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        cut = round(size * (1 - validation_fraction))
        start = max(cut - 1, 0)  # the byte before may be the end of a line already
        file.seek(start)
        line = file.readline(_NEWLINE_WITHIN)
    stop = start + len(line)
    if line.endswith(b"\n") and stop < size:
        cut = stop
    else:
        cut = next((n for n in range(cut, stop) if line[n - start] & 0xC0 != 0x80), stop)
    return Span(path, 0, cut), Span(path, cut, size)


def _decoded_blocks(path: Path, update: Callable[[bytes], None]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    try:
        with _reading(path) as file:
            while True:
                block = file.read(_BLOCK)
                pending = len(decoder.getstate()[0])  # the start of a character that the last block ended in
                update(block)
                yield decoder.decode(block, final=not block)
                position += len(block)
                if not block:
                    return
    except UnicodeDecodeError as error:
        offset = position - pending + error.start
        raise ConfigError(
            f"data.path: {path} is not UTF-8 at byte {offset} (0x{error.object[error.start]:02x}); "
            f"convert it, e.g. iconv -f latin1 -t utf-8"
        ) from error


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    """The open file. What goes wrong while it is read is a ConfigError that names it."""
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"data.path: {path} cannot be read ({error.strerror}); give a readable text file") from error


def _names(files: list[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"none of {len(files)} files, {files[0].name} to {files[-1].name},"
