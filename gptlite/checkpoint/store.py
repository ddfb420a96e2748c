"""The checkpoints folder on disk: names, atomic commit, leftovers. Knows nothing of what a checkpoint holds."""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gptlite.files import sync_folder, try_lock, write_whole
from gptlite.progress import Log

SMALL_FILES = 1 << 20  # bytes that a checkpoint takes beside its tensors, more or less
_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """`step-00000100` for step 100, so that names sort as numbers."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step a folder's name stands for; None if it is no step folder's name."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def step_folders(root: Path) -> list[Path]:
    """Committed step folders below `root`, newest first, whether intact or not."""
    if not root.is_dir():
        return []
    steps = [(step, path) for path in root.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(steps, reverse=True)]


@contextmanager
def writing(root: Path, log: Log) -> Iterator[None]:
    """Marks this process as a writer below `root` while the block runs, and first removes what dead writers left.

    Writers share a file lock, which the kernel drops when a process dies, however it dies. Whoever gets the lock
    alone therefore knows that nobody alive owns the staging folders it sees. Where the file system has no locks,
    leftovers stay.
    """
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".lock", "a") as lock:
        if try_lock(lock):
            for path in (*root.glob(".tmp-*"), *root.glob(".trash-*")):
                log(f"checkpoint: removing {path.name}, left by a process that ended while writing")
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        # Nothing of ours exists yet, so it does no harm that an exclusive lock is let go before it is shared.
        try_lock(lock, shared=True, wait=True)
        yield


@contextmanager
def staged(final: Path) -> Iterator[Path]:
    """A new folder to write in, named `final` once the block is over and all is on the disk; gone if the block raises.

    Raises OSError if `final` holds anything: a checkpoint is never overwritten.
    """
    folder = _hidden(final, "tmp")
    folder.mkdir()
    try:
        yield folder
        for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
            sync_folder(path)
        os.rename(folder, final)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    sync_folder(final.parent)


def check_space(root: Path, size: int) -> None:
    """Raises OSError (disk full) where `root`'s file system has no room for a checkpoint of `size` bytes of tensors."""
    free = shutil.disk_usage(root).free
    if free < size + SMALL_FILES:
        needed, there = (f"{number / 1e6:.1f} MB" for number in (size + SMALL_FILES, free))
        raise OSError(errno.ENOSPC, f"a checkpoint takes {needed}, and {there} are free", str(root))


def point_latest(final: Path) -> None:
    """Writes the step folder's name into `latest` beside it. People and scripts read it; resuming doesn't."""
    write_whole(final.with_name("latest"), final.name + "\n")


def remove(folder: Path) -> None:
    """Deletes a step folder. It loses its name first, so that a half-deleted one is never taken for a checkpoint."""
    trash = _hidden(folder, "trash")
    os.rename(folder, trash)
    shutil.rmtree(trash, ignore_errors=True)


def set_aside(folder: Path, why: str) -> Path:
    """Frees a step's name by renaming the folder to one that begins with `why`. Returns where it is now."""
    aside = folder.with_name(f"{why}-{folder.name}-{uuid.uuid4().hex[:8]}")
    os.rename(folder, aside)
    return aside


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{kind}-{path.name}-{uuid.uuid4().hex[:8]}")
