"""Atomic writes of files and folders: under a temporary name, synced to disk, then renamed. Writes that stay inside a
folder. Reads of regular files only."""

import errno
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO

from gptlite.errors import ConfigError, naming

LINK = "a symbolic link leads elsewhere; remove the link"
_LOCK, _WHOLE, _REPLACED = "lock", "whole", "replaced"  # in the folder of a new folder in progress
_SPECIAL = ((stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"), (stat.S_ISCHR, "device"), (stat.S_ISBLK, "device"))


def open_regular(path: str | Path, mode: str = "rb", **options: Any) -> Any:
    """Open a file for reading, like `open`. Links are followed.

    Raises ConfigError if it is a pipe, a socket or a device, whose end may never come; OSError if it is a folder or
    cannot be opened.
    """
    return open(path, mode, opener=_open_regular, **options)


def refuse_special(path: str | Path) -> None:
    """Raise ConfigError if `path` is a pipe, a socket or a device, for libraries that open the file themselves.

    A missing file is not an error here. Where gptlite opens the file, use `open_regular`.
    """
    with suppress(OSError):
        _refuse_special(path, os.stat(path).st_mode)


def open_inside(root: Path, path: Path, mode: str, encoding: str | None = None) -> IO[Any]:
    """Open a file of a folder that others may have made, such as that of a run: a regular file, not through a link.

    `root` itself may be a link, since the user has named it, but nothing below it. Raises OSError that names the link.
    """
    return open(path, mode, encoding=encoding, opener=partial(_open_inside, root))


def make_inside(root: Path, name: str) -> Path:
    """Create a subfolder of a folder that others may have made, unless it exists, and return its path.

    Raises OSError if it is a link: what is written in it would be elsewhere.
    """
    folder = root / name
    folder.mkdir(exist_ok=True)
    if folder.is_symlink():
        raise OSError(errno.ELOOP, LINK, str(folder))
    return folder


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` at the end of the block. If the block raises, `path` is unchanged.

    Until then the new file is `.tmp-<name>-<random>` in the same folder, which must exist. Raises OSError.
    """
    temporary = path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with naming(path), open(temporary, "wb") as file:
            yield file
            _sync(file)  # before the rename, or a power failure could leave an empty file under the final name
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write text (as UTF-8) or bytes atomically: `path` is always the complete old or new file. Raises OSError."""
    with replacing(path) as file:
        file.write(_bytes(content))


def write_synced(path: Path, content: str | bytes) -> None:
    """Write a file without a rename and sync it, for files whose name or folder is still temporary."""
    with naming(path), open(path, "wb") as file:
        file.write(_bytes(content))
        _sync(file)


@contextmanager
def new_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `folder`, synced to disk, after the block, and is removed if the block raises.

    Until then it is in `.<name>.partial` beside `folder`, under a lock. What a killed process leaves there, the next
    call removes. With `replace`, an existing folder is replaced. Raises ConfigError if another process writes the same
    folder, or if it exists and is not empty; OSError for errors of the disk.
    """
    folder = folder.resolve()  # a link to a folder on another disk is followed
    with _partial(folder) as partial:
        if not replace:
            refuse_used("folder", folder, holding="")
        (whole := partial / _WHOLE).mkdir()
        yield whole
        sync_tree(whole)  # before the rename, so that the name implies that the data is on disk
        if replace and folder.exists():
            os.rename(folder, partial / _REPLACED)
        os.rename(whole, folder)  # an error if it has files by now
        sync_folder(folder.parent)


def refuse_used(key: str, folder: Path, *, holding: str | None = None) -> None:
    """Raise ConfigError, naming the argument `key`, if a new folder exists.

    With `holding`, the folder may exist if it is empty, or if a process was killed in `new_folder(folder / holding)`.
    """
    if not folder.exists() and not folder.is_symlink():
        return
    if holding is not None and folder.is_dir() and {each.name for each in folder.iterdir()} <= {_hidden(holding)}:
        return
    at = folder.resolve()
    if (at.parent / _hidden(at.name)).exists():  # left by a process that was killed after the rename
        with suppress(ConfigError, OSError), _partial(at):
            pass
    raise ConfigError(f"{key}={folder} exists; nothing is overwritten, give a new folder")


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries. Without this, a new or renamed file may be lost in a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync all files below a folder, and their directory entries."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with naming(path := os.path.join(parent, name)), open(path, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(parent))


def try_lock(file: IO[Any], *, shared: bool = False, wait: bool = False) -> bool | None:
    """Lock an open file, exclusively unless `shared`, until it is closed or the process ends.

    Returns True if the lock is held, False if another process holds it, None if the file system has no locks. With
    `wait`, wait for the other process instead of returning False.
    """
    try:
        import fcntl

        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing ancestor."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def unwritable(folder: Path, key: str) -> str:
    """Return the reason why a folder, existing or to be created, cannot be written; empty if it can.

    `key` is the configuration key named in the message. The check creates a temporary file and removes it, because
    permission bits do not account for root, an exceeded quota or a read-only mount.
    """
    above = existing(folder)
    if not above.is_dir():
        return f"{above} is a file; give a folder"
    try:
        with tempfile.TemporaryFile(dir=above):
            return ""
    except OSError as error:
        return f"{above}: {(error.strerror or 'cannot be written').lower()}; give another {key}"


def _hidden(name: str) -> str:
    return f".{name}.partial"


@contextmanager
def _partial(folder: Path) -> Iterator[Path]:
    """Lock the folder in which `new_folder` writes `folder`, empty it, and remove it after the block."""
    partial = folder.parent / _hidden(folder.name)
    with _claimed(partial, folder):
        if strangers := {each.name for each in partial.iterdir()} - {_LOCK, _WHOLE, _REPLACED}:
            raise ConfigError(f"{partial} holds {min(strangers)}, which gptlite has not written; move it elsewhere")
        try:
            _settle(partial, folder)
            yield partial
        finally:
            with suppress(OSError):  # the next call tries again
                _settle(partial, folder)
                (partial / _LOCK).unlink()
                partial.rmdir()


@contextmanager
def _claimed(partial: Path, folder: Path) -> Iterator[None]:
    """Create a folder unless it exists, and hold the lock in it. Raises ConfigError if another process holds it."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    while True:
        known = partial.exists()
        partial.mkdir(exist_ok=True)
        try:
            lock = open_inside(partial.parent, partial / _LOCK, "a")
        except FileNotFoundError:  # another process has removed the folder meanwhile
            continue
        with lock:
            if (held := try_lock(lock)) is False:
                raise ConfigError(f"{folder} is being written by another process; wait for it, or give another folder")
            if held is None and known:  # this file system has no locks
                raise ConfigError(f"{folder} may be being written by another process; if it is not, remove {partial}")
            if same := _is(lock, partial / _LOCK):  # else the other process has removed it meanwhile
                yield
        if same:
            return


def _is(file: IO[Any], path: Path) -> bool:
    """Return True if an open file is the one that `path` names."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _settle(partial: Path, folder: Path) -> None:
    """Remove what was written into a partial folder. Restore what was to be replaced, unless its successor is there."""
    if (replaced := partial / _REPLACED).exists() and not folder.exists():
        os.rename(replaced, folder)
    for each in (partial / _WHOLE, replaced):
        if each.exists():
            shutil.rmtree(each)


def _open_regular(path: str, flags: int) -> int:
    """Return a file descriptor, as `open_regular` does."""
    _refuse_special(path, os.stat(path).st_mode)  # before it is opened, since that alone may change a device's state
    # Non-blocking, as the file may be another one by now.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _refuse_special(path, os.fstat(descriptor).st_mode)
    except ConfigError:
        os.close(descriptor)
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def _refuse_special(path: str | Path, mode: int) -> None:
    for matches, kind in _SPECIAL:
        if matches(mode):
            raise ConfigError(f"{path} is a {kind}, not a regular file; replace it by a regular file")


def _open_inside(root: Path, path: str, flags: int) -> int:
    """Return a file descriptor, as `open_inside` does. Each folder is opened in the one above, so that none can be
    exchanged for a link meanwhile."""
    *folders, name = Path(path).relative_to(root).parts
    held = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in folders:
            below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=held)
            os.close(held)
            held = below
        # O_NONBLOCK: a pipe without a reader is an error, not a wait.
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=held)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise OSError(errno.ELOOP, LINK, path) from None
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(held)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file; remove it", path)
    os.set_blocking(descriptor, True)
    return descriptor


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _bytes(content: str | bytes) -> bytes:
    return content.encode("utf-8") if isinstance(content, str) else content
