"""Where compiled libraries are kept: compiled once for a machine, however many processes want it at once."""

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

UNFINISHED = ".build-"  # how a folder is called in which a compilation is under way


@dataclass(frozen=True)
class Record:
    """What is known of a compiled library, in a file beside it."""

    sha256: str
    cuda: bool
    why_no_cuda: str
    compiler: str
    nvcc: str
    seconds: float


def home_folder(make: bool = False) -> Path:
    """Where libraries belong: ~/.cache/gptlite/kernels, or under XDG_CACHE_HOME. Raises BuildError, OSError."""
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:  # no HOME, and the user has no entry among the system's
        raise BuildError(str(error)) from error
    folder = Path(root, "gptlite", "kernels")
    if make:
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def temporary_folder(make: bool = False) -> Path:
    """Where they go if that cannot be written. Raises BuildError where it is not this user's alone, OSError."""
    folder = Path(tempfile.gettempdir(), f"gptlite-kernels-{os.getuid()}")
    if make:
        folder.mkdir(mode=0o700, exist_ok=True)
    # What lies there is run: in a folder where all may write, nobody else must have put it there.
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise BuildError(f"{folder} is not a folder of this user alone")
    return folder


def known_folders() -> list[Path]:
    """Those of the two that are there to be read from."""
    folders = []
    for find in (home_folder, temporary_folder):
        with contextlib.suppress(BuildError, OSError):
            folders.append(find())
    return folders


def writable_folder(log: Log) -> Path:
    """The first of the two that takes files, made if need be. Raises BuildError."""
    why = []
    for find in (home_folder, temporary_folder):
        try:
            folder = find(make=True)
            with tempfile.TemporaryFile(dir=folder):  # its mode says nothing of a disk that is mounted read-only
                pass
        except (OSError, BuildError) as error:
            why.append(str(error))
            continue
        if why:
            log(f"kernels: {why[0]}; kept in {folder} instead")
        return folder
    raise BuildError(f"no folder to compile in: {'; '.join(why)}")


def lookup(library: Path) -> Record | None:
    """The record of a library that is there and whole."""
    try:
        record = Record(**json.loads(library.with_suffix(".json").read_text(encoding="utf-8")))
        return record if record.sha256 == _digest(library) else None
    except (OSError, ValueError, TypeError):
        return None


def keep(library: Path, record: Record, compiled: Path) -> Record:
    """Gives a compiled library its name in the cache. Under `locked`. Raises OSError."""
    with replacing(library) as file:
        file.write(compiled.read_bytes())
    record = replace(record, sha256=_digest(library))
    write_whole(library.with_suffix(".json"), json.dumps(asdict(record), indent=2) + "\n")
    return record


@contextmanager
def locked(folder: Path, log: Log) -> Iterator[None]:
    """Holds the folder's lock, which dies with its process; where the file system has none, several may compile."""
    with (folder / ".lock").open("w") as file:
        if (alone := try_lock(file)) is False:
            log("kernels: another process is compiling them: waiting")
            try_lock(file, wait=True)
        elif alone:
            for leftover in folder.glob(f"{UNFINISHED}*"):  # of a process that was killed: the lock is ours
                shutil.rmtree(leftover, ignore_errors=True)
        yield


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def forget(library: Path) -> None:
    """Removes a library and its record, if they are there."""
    for path in (library, library.with_suffix(".json")):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
