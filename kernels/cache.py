"""Cache of compiled libraries. A library is compiled once per machine, even for many concurrent processes."""

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gptlite.files import replacing, try_lock, write_whole
from gptlite.kernels.toolchain import BuildError
from gptlite.progress import Log

UNFINISHED = ".build-"  # name prefix of a folder with a compilation in progress


@dataclass(frozen=True)
class LibraryRecord:
    """Metadata of a compiled library, stored in a file beside it."""

    sha256: str
    cuda: bool
    why_no_cuda: str
    compiler: str
    nvcc: str
    seconds: float


def home_folder(make: bool = False) -> Path:
    """Return the default folder, gptlite/kernels in $XDG_CACHE_HOME or ~/.cache. Raises BuildError or OSError."""
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:  # no HOME, and no passwd entry for the user
        raise BuildError(str(error)) from error
    folder = Path(root, "gptlite", "kernels")
    if make:
        folder.mkdir(parents=True, exist_ok=True)
    refuse_writers(folder)
    return folder


def refuse_writers(folder: Path) -> None:
    """Raise BuildError if another user than this one or root may change a folder, or exchange one above it.

    Code in the folder is executed. A folder that only root can write may be shared by all. The user's own group may
    write, as where each user has a group; in a folder with the sticky bit, such as /tmp, only owners exchange entries.
    """
    path = folder.absolute()
    for directory in (path, *path.parents):
        try:
            status = directory.stat()
        except FileNotFoundError:
            continue
        by_group = status.st_mode & stat.S_IWGRP and status.st_gid not in (os.getgid(), 0)
        by_others = status.st_mode & stat.S_IWOTH or by_group
        if status.st_uid not in (os.getuid(), 0) or (
            by_others and (directory == path or not status.st_mode & stat.S_ISVTX)
        ):
            raise BuildError(
                f"{directory} can be changed by another user; set its owner and mode, or set XDG_CACHE_HOME"
            )


def temporary_folder(make: bool = False) -> Path:
    """Return the fallback folder under /tmp. Raises OSError, and BuildError if another user has access."""
    folder = Path(tempfile.gettempdir(), f"gptlite-kernels-{os.getuid()}")
    if make:
        folder.mkdir(mode=0o700, exist_ok=True)
    # Code in this folder is executed, and any user can create the folder in /tmp. Accept only a private folder.
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise BuildError(f"{folder} must be a folder that only this user can access; remove it")
    return folder


def known_folders() -> list[Path]:
    """Return the cache folders to search for libraries, without folders that cannot be determined."""
    folders = []
    for find in (home_folder, temporary_folder):
        with contextlib.suppress(BuildError, OSError):
            folders.append(find())
    return folders


def writable_folder(log: Log) -> Path:
    """Return the first cache folder that is writable, created if missing. Raises BuildError if there is none."""
    why = []
    for find in (home_folder, temporary_folder):
        try:
            folder = find(make=True)
            with tempfile.TemporaryFile(dir=folder):  # the folder's permissions do not reveal a read-only mount
                pass
        except (OSError, BuildError) as error:
            why.append(str(error))
            continue
        if why:
            log(f"kernels: {why[0]}; the library is stored in {folder} instead")
        return folder
    raise BuildError(f"no writable folder to compile in: {'; '.join(why)}")


def lookup(library: Path) -> LibraryRecord | None:
    """Return the record of a library, or None if a file is missing or the library does not match its hash."""
    try:
        record = LibraryRecord(**json.loads(library.with_suffix(".json").read_text(encoding="utf-8")))
        return record if record.sha256 == _digest(library) else None
    except (OSError, ValueError, TypeError):
        return None


def keep(library: Path, record: LibraryRecord, compiled: Path) -> LibraryRecord:
    """Store a library in the cache and return its record with the hash. Call it within `locked`. Raises OSError."""
    with replacing(library) as file:
        file.write(compiled.read_bytes())
    record = replace(record, sha256=_digest(library))
    write_whole(library.with_suffix(".json"), json.dumps(asdict(record), indent=2) + "\n")
    return record


@contextmanager
def locked(folder: Path, log: Log) -> Iterator[None]:
    """Hold the lock of the folder during the block. If the file system has no locks, several processes may compile."""
    with (folder / ".lock").open("w") as file:
        if (alone := try_lock(file)) is False:
            log("kernels: another process is compiling the kernels; waiting for it")
            try_lock(file, wait=True)
        elif alone:
            for leftover in folder.glob(f"{UNFINISHED}*"):  # of a killed process; a live one would hold the lock
                shutil.rmtree(leftover, ignore_errors=True)
        yield


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def forget(library: Path) -> None:
    """Remove a library and its record, if they exist."""
    for path in (library, library.with_suffix(".json")):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
