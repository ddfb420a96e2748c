"""Files that are whole or not there: written under another name, brought to the disk, renamed."""

import os
import tempfile
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


def sync_tree(folder: Path) -> None:
    """Brings all files below a folder, and their names, to the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(Path(parent, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(parent))


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def unwritable(folder: Path, key: str) -> str:
    """Why nothing can be made in a folder that is there or is to be made; empty where it can. Leaves nothing behind.

    `key` is what the user would give another of. Permission bits do not tell: not for root, a full quota or a
    read-only mount. So a file without a name is made.
    """
    above = existing(folder)
    if not above.is_dir():
        return f"{above} is a file; give a folder"
    try:
        with tempfile.TemporaryFile(dir=above):
            return ""
    except OSError as error:
        return f"{above}: {(error.strerror or 'cannot be written').lower()}; give another {key}"


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _bytes(content: str | bytes) -> bytes:
    return content.encode("utf-8") if isinstance(content, str) else content
