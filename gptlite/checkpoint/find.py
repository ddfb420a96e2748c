"""Resolution of a user's path to a verified checkpoint."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from gptlite.checkpoint import store
from gptlite.checkpoint.manifest import FILE_NAME, DamagedCheckpoint, verify
from gptlite.errors import ConfigError, did_you_mean
from gptlite.invocation import command
from gptlite.progress import Log, counted


def find_checkpoint(path: str, key: str, log: Log = print) -> Path:
    """Return the verified step folder `path`, or the newest intact one if `path` is a checkpoints or run folder.

    Every rejected checkpoint is logged with the reason. Raises ConfigError if there is none, naming `key`, the setting
    whose value is `path`.
    """
    return first_intact(candidates(path, key), path, key, log, partial(verify, log=log))


def is_step(folder: Path) -> bool:
    """Return True if a folder is a single checkpoint: it has a manifest or the name of a step folder."""
    return (folder / FILE_NAME).exists() or store.step_of(folder) is not None


def candidates(path: str, key: str, *, keywords: tuple[str, ...] = ()) -> list[Path]:
    """Return the step folders at `path`, newest first, without reading them. Raises ConfigError if there are none.

    `keywords` are the values of `key` that are not paths, for the error message.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        others = "".join(f"{keyword}, " for keyword in keywords)
        hint = did_you_mean(path.lower(), keywords) or f"; give {others}a run folder or a checkpoint folder"
        raise ConfigError(f"{key}={path} does not exist{hint}")
    if is_step(folder):
        return [folder]
    folders = store.step_folders(folder) or store.step_folders(folder / "checkpoints")
    if not folders and (folder / "config.json").is_file():
        given = f"{command('checkpoint')} import {path} RUN_DIR"
        raise ConfigError(f"{key}={path} is a Hugging Face model; convert it first: {given}, then {key}=RUN_DIR")
    if not folders:
        raise ConfigError(f"{key}={path} holds no checkpoint; give a run folder or a checkpoint folder")
    return folders


def first_intact(folders: list[Path], path: str, key: str, log: Log, check: Callable[[Path], object]) -> Path:
    """Return the first of the `candidates` for `path` that passes `check`.

    Raises ConfigError if none does, or DamagedCheckpoint if `path` is itself a step folder.
    """
    if folders == [Path(path).expanduser()]:
        check(folders[0])
        return folders[0]
    return newest_intact(folders, f"{key}={path}", f"set {key} to another path", log, check)


def newest_intact(folders: list[Path], where: str, fix: str, log: Log, check: Callable[[Path], object]) -> Path:
    """Return the first of `folders` that passes `check`.

    Raises ConfigError if none is intact. The message has `where`, the location of the folders, and the `fix`.
    """
    folder, reason = passing_over(folders, log, check)
    if folder is None:
        words = f"{counted(len(folders), 'checkpoint')} found, but none is intact ({folders[0].name}: {reason})"
        raise ConfigError(f"{where}: {words}; {fix}")
    return folder


def passing_over(folders: list[Path], log: Log, check: Callable[[Path], object]) -> tuple[Path | None, str]:
    """Return the first of `folders` that passes `check`, or None, and the reason for the first rejection, if any.

    Every rejected checkpoint is logged with the reason.
    """
    reason = ""
    for folder in folders:
        try:
            check(folder)
        except DamagedCheckpoint as error:
            reason = reason or error.reason
            log(f"checkpoint: rejected {folder}: {error.reason}")
        else:
            return folder, reason
    return None, reason


def damage(folder: Path, log: Log, *, hashes: bool = False) -> str:
    """Return the reason why a checkpoint is damaged; "" if it is intact. Checks file sizes; if `hashes`, all bytes."""
    try:
        verify(folder, log, hashes=hashes)
    except DamagedCheckpoint as error:
        return error.reason
    return ""


def beyond(root: Path, saved: Path, keep: int, every: int, log: Log) -> list[Path]:
    """Return the checkpoints older than the newest `keep` intact ones, except `saved` and steps divisible by `every`.

    Checkpoints count as intact if their file sizes are right. `keep=0` keeps all. A damaged checkpoint is neither
    counted nor returned: it may be the only copy left, and deleting it is the user's decision.
    """
    if keep == 0:
        return []
    older = [folder for folder in store.step_folders(root) if not damage(folder, log)][keep:]
    return [each for each in older if each != saved and not (every and (store.step_of(each) or 0) % every == 0)]
