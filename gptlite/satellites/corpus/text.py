"""Plain text on disk: file discovery, UTF-8 check, hash, and validation split."""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gptlite.documents import Digest, read_json
from gptlite.errors import ConfigError
from gptlite.files import open_regular, write_whole
from gptlite.invocation import command
from gptlite.progress import Log, Progress
from gptlite.satellites.corpus.recognize import refuse_folder, refuse_suffix
from gptlite.satellites.corpus.walk import files_below, linked_folders, refuse_broken_link

_BLOCK = 1 << 20  # bytes read at a time
_NEWLINE_WITHIN = 1 << 16  # bytes that a cut may move forward to the end of a line
_VERSION = 1  # of the checks in `scan`; a new version invalidates the remembered digests
_LARGE = 16 * 2**20  # bytes
_SETTLED = 2_000_000_000  # nanoseconds; the coarsest timestamp resolution of a file system (FAT)
_RECORDS = {".jsonl", ".ndjson", ".json", ".parquet", ".pq", ".gz", ".zst", ".xz", ".bz2"}  # input of preprocess


@dataclass(frozen=True)
class Span:
    """Byte range [start, stop) of a file, cut between characters. Iterates over the text in `raw_blocks`, decoded."""

    path: Path
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self.stop - self.start

    def __iter__(self) -> Iterator[str]:
        return (block.decode("utf-8") for block in self.raw_blocks())

    def raw_blocks(self) -> Iterator[bytes]:
        """Yield the text in pieces of whole lines, about a megabyte each."""
        with _reading(self.path) as file:
            file.seek(self.start)
            while (left := self.stop - file.tell()) > 0:
                block = file.read(min(_BLOCK, left))
                # to the end of a line, so that no character is cut
                block += file.readline(left - len(block)) if left > len(block) else b""
                if not block:
                    raise ConfigError(f"data.path: {self.path} became shorter while it was read; start again")
                yield block


def find_files(path: str) -> list[Path]:
    """Return the file at `path`, or all *.txt files below it, sorted. Raises ConfigError if there is no file."""
    root = Path(path).expanduser()
    refuse_records(path)
    refuse_broken_link("data.path", root)
    if not path.strip() or not root.exists():
        raise ConfigError(f"data.path={path} does not exist; give a text file or a folder of .txt files")
    refuse_suffix("data.path", root)
    if root.is_dir():
        refuse_folder("data.path", root)
        files = files_below(root, "data.path", [".txt"], hidden=True)
    else:
        files = [root] if root.is_file() else []  # no device or pipe, which may never end
    if not files:
        raise ConfigError(f"data.path={path} holds no .txt files; give a text file or a folder of .txt files")
    return files


def newly_followed(path: str) -> str:
    """Return a clause on the linked folders below `path`, which the first version of gptlite left out; empty if there
    are none."""
    root = Path(path).expanduser()
    if not root.is_dir() or not (links := linked_folders(find_files(path), root)):
        return ""
    return f"; its linked folder {links[0]} is read now, and an earlier gptlite left it out: move it away to resume"


def refuse_records(path: str) -> None:
    """Raise ConfigError for a file of records or a compressed file, which is not plain text."""
    if Path(path).suffix.lower() in _RECORDS and not Path(path).expanduser().is_dir():
        raise ConfigError(
            f"data.path={path} is a record or compressed file, not plain text; tokenize it: {command('preprocess')} "
            f"input={path} tokenizer=... output=data/mine, and train with data=mine; or name it .txt if it is text"
        )


def scan(files: list[Path], log: Log = print) -> str:
    """Return the SHA-256 of the files' contents, in order.

    Raises ConfigError naming the file and the byte that is not UTF-8, or if there is only white space.
    """
    digest, blank = hashlib.sha256(), True
    progress = Progress("reading", sum(file.stat().st_size for file in files), log)
    for path in files:
        position, size = 0, path.stat().st_size
        digest.update(size.to_bytes(8, "little"))  # so that moving text between files changes the hash
        for block in Span(path, 0, size).raw_blocks():
            digest.update(block)
            progress.add(len(block))
            try:
                blank = not block.decode("utf-8").strip() and blank
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"data.path: {path} is not UTF-8 at byte {position + error.start} (0x{block[error.start]:02x}); "
                    f"convert it, e.g. iconv -f latin1 -t utf-8"
                ) from error
            position += len(block)
    if blank:
        several = f"the {len(files)} files {files[0].name} to {files[-1].name} have no text"
        words = several if len(files) > 1 else f"{files[0]} has no text"
        raise ConfigError(f"data.path: {words}, only white space; give a file with text")
    return digest.hexdigest()


def text_digest(files: list[Path], cache_dir: Path, log: Log) -> str:
    """Return `scan(files)`, cached in `cache_dir` as long as each file keeps its path, size and times.

    The change time is compared too, since copying tools preserve the modification time. Raises the errors of `scan`,
    and ConfigError if a file changes while it is read.
    """
    stamps = _stamps(files)
    paths = json.dumps([_VERSION, [path for path, *_ in stamps]])
    note = cache_dir / f".digest-{hashlib.sha256(paths.encode()).hexdigest()[:16]}.json"
    state = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()
    with suppress(OSError, ValueError):  # no cached digest yet, or a damaged one
        remembered = read_json(note, dict[str, Digest])
        if remembered.get("state") == state and "sha256" in remembered:
            return remembered["sha256"]
    digest = scan(files, log)
    if _stamps(files) != stamps:
        raise ConfigError(f"data.path: {files[0].parent} changed while it was read; start again once writing has ended")
    # A small text is quick to read again. A file modified a moment ago could change again with the same timestamp.
    large = sum(size for _, size, *_ in stamps) >= _LARGE
    if large and time.time_ns() - max(max(times) for _, _, *times in stamps) > _SETTLED:
        with suppress(OSError):  # a shared cache may be read-only
            cache_dir.mkdir(parents=True, exist_ok=True)
            write_whole(note, json.dumps({"state": state, "sha256": digest}) + "\n")
    return digest


def _stamps(files: list[Path]) -> list[tuple[str, int, int, int]]:
    """Return each file's absolute path, size in bytes, and modification and change times in nanoseconds."""
    stamps = []
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise ConfigError(f"data.path: {path} cannot be read ({error.strerror})") from error
        stamps.append((str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return stamps


def split_text(path: Path, validation_fraction: float) -> tuple[Span, Span]:
    """Split a file into a training part and a held-out end. The cut is at the end of a line if one is near."""
    with _reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        cut = round(size * (1 - validation_fraction))
        start = max(cut - 1, 0)  # the byte before the cut may already end a line
        file.seek(start)
        line = file.readline(_NEWLINE_WITHIN)
    stop = start + len(line)
    if line.endswith(b"\n") and stop < size:
        cut = stop
    else:
        cut = next((n for n in range(cut, stop) if line[n - start] & 0xC0 != 0x80), stop)  # the start of a character
    return Span(path, 0, cut), Span(path, cut, size)


@contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    """Open a file during the block. An OSError in the block becomes a ConfigError that names the file."""
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        raise ConfigError(f"data.path: {path} cannot be read ({error.strerror}); give a readable text file") from error
