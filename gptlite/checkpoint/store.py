"""Checkpoints folder on disk: names, atomic commits, unfinished folders. Independent of a checkpoint's contents."""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gptlite.errors import system_error
from gptlite.files import make_inside, open_inside, sync_folder, try_lock, write_whole
from gptlite.progress import Log

_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """Return the folder name of a step: `step-00000100` for step 100, so that names sort like numbers."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step in a folder's name, or None if it is not the name of a step folder."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def step_folders(root: Path) -> list[Path]:
    """Return the committed step folders below `root`, newest first, intact or not."""
    if not root.is_dir():
        return []
    steps = [(step, path) for path in root.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(steps, reverse=True)]


@contextmanager
def writing(root: Path, log: Log) -> Iterator[None]:
    """Register this process as a writer below `root` for the block, after removing files left by dead processes.

    Writers hold a shared file lock, which the kernel releases when a process ends. Therefore, if a process gets
    the exclusive lock, no live process owns the hidden folders (.tmp-, .trash-). On a file system without locks, these
    folders are not removed.
    """
    root.mkdir(parents=True, exist_ok=True)
    make_inside(root.parent, root.name)
    with open_inside(root, root / ".lock", "a") as lock:
        if try_lock(lock):
            for path in (*root.glob(".tmp-*"), *root.glob(".trash-*")):
                log(f"checkpoint: removing {path.name}, left by a process that ended while writing")
                if reason := _delete(path):
                    log(f"checkpoint: cannot be removed wholly: {system_error(reason)}")
        # The exclusive lock is released before the shared one is held. This is safe, as no files are written yet.
        try_lock(lock, shared=True, wait=True)
        yield


@contextmanager
def staged(final: Path) -> Iterator[Path]:
    """Yield a new folder. After the block, sync it to disk and rename it to `final`, or delete it if the block raises.

    Raises OSError if `final` is not empty: a checkpoint is never overwritten.
    """
    folder = _hidden(final, "tmp")
    folder.mkdir()
    try:
        yield folder
        for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
            sync_folder(path)  # file contents are synced already; this makes their names durable
        os.rename(folder, final)  # atomic, and an error if `final` has files
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    sync_folder(final.parent)  # makes the rename durable


def check_space(root: Path, size: int) -> None:
    """Raise OSError (disk full) unless `root`'s file system has room for a checkpoint of `size` bytes on disk."""
    free = shutil.disk_usage(root).free
    if free < size:
        needed, there = (f"{number / 1e6:.1f} MB" for number in (size, free))
        raise OSError(errno.ENOSPC, f"a checkpoint takes {needed}, but only {there} are free", str(root))


def point_latest(final: Path) -> None:
    """Write a step folder's name to the file `latest` beside it, for people and scripts; resuming does not read it."""
    write_whole(final.with_name("latest"), final.name + "\n")


def remove(folder: Path) -> None:
    """Delete a step folder. It is renamed first, so that a partly deleted folder is never mistaken for a checkpoint.

    Raises OSError with what could not be deleted; the next writer tries again.
    """
    trash = _hidden(folder, "trash")
    os.rename(folder, trash)
    if reason := _delete(trash):
        raise OSError(reason.errno, f"cannot be removed wholly: {reason.strerror or reason}", str(trash))


def set_aside(folder: Path, why: str) -> Path:
    """Rename a step folder to a name that begins with `why`, which frees the step's name. Return the new path."""
    aside = folder.with_name(f"{why}-{folder.name}-{uuid.uuid4().hex[:8]}")
    os.rename(folder, aside)
    return aside


def _delete(path: Path) -> OSError | None:
    """Delete a folder, a file or a link, but nothing that a link leads to. Return the first error, after deleting all
    that can be deleted."""
    errors: list[OSError] = []

    def note(function: Any, name: Any, found: Any) -> None:
        errors.append(found[1])

    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, onerror=note)  # which follows no link
    else:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            errors.append(error)
    return errors[0] if errors else None


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{kind}-{path.name}-{uuid.uuid4().hex[:8]}")
