"""Folders that are made once, under a name that is the hash of what goes into them."""

import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gptlite.data.indexed import sync_folder
from gptlite.data.progress import Log
from gptlite.errors import ConfigError


def cached_folder(root: Path, name: str, key: dict[str, str], make: Callable[[Path], None], log: Log) -> Path:
    """The folder `root/name-<hash of key>`, filled by `make(temporary folder)` if it is not there yet.

    It gets its name when it is whole. Processes that want the same folder at once wait for the first; whatever
    `make` raises, Ctrl-C included, leaves nothing. ConfigError if `root` cannot be written.
    """
    text = json.dumps(key, sort_keys=True, indent=2)
    folder = root / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".lock-{folder.name}", f"another process is preparing {folder}: waiting", log):
            if not folder.is_dir():
                _make(folder, text, make)
    except OSError as error:
        raise ConfigError(f"data.cache_dir={root} cannot be written: {error}; give another data.cache_dir") from error
    return folder


def _make(folder: Path, key: str, make: Callable[[Path], None]) -> None:
    prefix = f".tmp-{folder.name}-"
    for leftover in folder.parent.glob(f"{prefix}*"):  # of a process that was killed: the lock is ours
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = folder.with_name(prefix + uuid.uuid4().hex)
    temporary.mkdir()
    try:
        make(temporary)
        (temporary / "key.json").write_text(key + "\n", encoding="utf-8")
        _sync_tree(temporary)
        os.rename(temporary, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(Path(parent, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(parent))


@contextmanager
def _locked(path: Path, notice: str, log: Log) -> Iterator[None]:
    # The lock dies with its process, and the file stays: removing it would let two in at once.
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(notice)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
