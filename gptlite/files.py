"""Files that are whole or not there: written under another name, brought to the disk, renamed."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the name `path` once the block is over; if the block raises, `path` stays as it was.

    Meanwhile it is `.tmp-<name>-<random>` in the same folder, which must exist. Raises OSError.
    """
    temporary = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as file:
            yield file
            _sync(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file, text as UTF-8, so that `path` is either the old one or the whole new one. Raises OSError."""
    with replacing(path) as file:
        file.write(_bytes(content))


def write_synced(path: Path, content: str | bytes) -> None:
    """Writes a file in place and waits for the disk: for files whose folder or name is not final yet."""
    with open(path, "wb") as file:
        file.write(_bytes(content))
        _sync(file)


def sync_folder(folder: Path) -> None:
    """Brings a folder's entries to the disk: without it a new or renamed file may be gone after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _bytes(content: str | bytes) -> bytes:
    return content.encode("utf-8") if isinstance(content, str) else content
