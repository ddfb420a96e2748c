"""Folders that are made once, under a name that is the hash of what goes into them."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from gptlite.errors import ConfigError
from gptlite.files import sync_folder, sync_tree, try_lock
from gptlite.progress import Log

_FULL = (errno.ENOSPC, errno.EDQUOT)


def cached_folder(root: Path, name: str, key: dict[str, str], make: Callable[[Path], None], log: Log) -> Path:
    """The folder `root/name-<hash of key>`, filled by `make(temporary folder)` if it is not there yet.

    It gets its name when it is whole. Processes that want the same folder at once wait for the first; whatever
    `make` raises, Ctrl-C included, leaves nothing. ConfigError if `root` cannot be written, or a file cannot be.
    """
    folder = cached_path(root, name, key)
    if folder.is_dir():
        return folder
    with _locked(root, f".lock-{folder.name}", f"another process is preparing {folder}: waiting", log):
        if not folder.is_dir():
            _make(folder, _text(key), make)
    return folder


def cached_path(root: Path, name: str, key: dict[str, str]) -> Path:
    """Where `cached_folder` keeps it, made or not."""
    return root / f"{name}-{hashlib.sha256(_text(key).encode()).hexdigest()[:16]}"


def _text(key: dict[str, str]) -> str:
    return json.dumps(key, sort_keys=True, indent=2)


def _make(folder: Path, key: str, make: Callable[[Path], None]) -> None:
    for leftover in folder.parent.glob(f".tmp-{folder.name}-*"):  # of a process that was killed: the lock is ours
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        with new_folder(folder) as temporary:
            make(temporary)
            (temporary / "key.json").write_text(key + "\n", encoding="utf-8")
    except OSError as error:
        full = error.errno in _FULL
        fix = "free some space, or give another data.cache_dir" if full else "if that is in there, give another"
        raise ConfigError(f"data could not be prepared in data.cache_dir={folder.parent}: {error}; {fix}") from error


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, which takes that name when the block ends well; else nothing is left."""
    temporary = folder.with_name(f".tmp-{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        sync_tree(temporary)
        temporary.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _locked(root: Path, name: str, notice: str, log: Log) -> Iterator[None]:
    """Holds the lock file `root/name`, which dies with its process and is gone after the block."""
    path = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = _hold(path, notice, log)
    except OSError as error:
        raise ConfigError(f"data.cache_dir={root} cannot be written: {error}; give another data.cache_dir") from error
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _hold(path: Path, notice: str, log: Log) -> TextIO:
    while True:
        file = path.open("w")
        if try_lock(file) is False:
            log(notice)
            try_lock(file, wait=True)
        # Its last holder may have removed the file meanwhile: then this locks a name that others no longer see.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()
