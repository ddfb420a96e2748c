"""Content-addressed cache of prepared folders: each is made once and named by the hash of its key."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from gptlite.errors import ConfigError, system_error
from gptlite.files import new_folder, try_lock
from gptlite.progress import Log


def cached_folder(root: Path, name: str, key: dict[str, str], make: Callable[[Path], None], log: Log) -> Path:
    """Return the folder `root/name-<hash of key>`, filled by `make(temporary folder)` if it does not exist yet.

    The folder gets its name only when complete. Concurrent processes that need the same folder wait for the first one.
    If `make` raises, including KeyboardInterrupt, the temporary folder is removed. Raises ConfigError if `root` or a
    file cannot be written.
    """
    folder = cached_path(root, name, key)
    if folder.is_dir():
        return folder
    with _locked(root, f".lock-{folder.name}", f"another process is preparing {folder}: waiting", log):
        if not folder.is_dir():
            _make(folder, _text(key), make)
    return folder


def cached_path(root: Path, name: str, key: dict[str, str]) -> Path:
    """Return the path at which `cached_folder` keeps a folder, which may not exist yet."""
    return root / f"{name}-{hashlib.sha256(_text(key).encode()).hexdigest()[:16]}"


def _text(key: dict[str, str]) -> str:
    return json.dumps(key, sort_keys=True, indent=2)


def _make(folder: Path, key: str, make: Callable[[Path], None]) -> None:
    try:
        with new_folder(folder) as temporary:
            make(temporary)
            (temporary / "key.json").write_text(key + "\n", encoding="utf-8")
    except OSError as error:
        words = system_error(error, "give another data.cache_dir")
        raise ConfigError(f"data could not be prepared in data.cache_dir={folder.parent}: {words}") from error


@contextmanager
def _locked(root: Path, name: str, notice: str, log: Log) -> Iterator[None]:
    """Hold the lock file `root/name` during the block, then remove it. The lock is released if the process dies."""
    path = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = _hold(path, notice, log)
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir={root} cannot be written: {system_error(error, 'give another data.cache_dir')}"
        ) from error
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
        # The previous holder may have removed the file meanwhile. Then this lock is on an unlinked file: try again.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()
