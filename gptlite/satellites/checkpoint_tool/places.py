"""Resolution of a user's paths to checkpoints and configurations. This module does not import torch."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gptlite.checkpoint import store
from gptlite.checkpoint.find import damage, is_step
from gptlite.checkpoint.manifest import read_file
from gptlite.config.saved import from_yaml, to_dict
from gptlite.documents import refuse_yaml
from gptlite.errors import ConfigError, did_you_mean
from gptlite.files import open_regular, try_lock
from gptlite.metrics.console import format_duration
from gptlite.progress import log

DEPTH = 3  # levels of the search for runs in a folder: a sweep has date/time/job
LEFT = (".tmp-*", ".trash-*", "damaged-*", "superseded-*")


def existing(path: str, fix: str = "") -> Path:
    """Return the folder or file `path`. Raises ConfigError if it does not exist, with `fix` if no name is similar."""
    location = Path(path).expanduser()
    if not location.exists():
        names = [each.name for each in location.parent.iterdir()] if location.parent.is_dir() else []
        raise ConfigError(f"{path} does not exist{did_you_mean(location.name, names) or fix}")
    return location


def roots(path: str) -> list[Path]:
    """Return the checkpoints folders at `path`: `path` itself, that of the run, or those of all runs below a folder.

    Raises ConfigError if there are none, or if `path` is a step folder.
    """
    folder = existing(path, "; give a run folder, or a folder of runs")
    if is_step(folder):
        raise ConfigError(f"{path} is one checkpoint; give its run, or use inspect")
    if store.step_folders(folder) or (folder.name == "checkpoints" and folder.is_dir()):
        return [folder]
    if (folder / "checkpoints").is_dir():
        return [folder / "checkpoints"]
    below = [each for depth in range(1, DEPTH + 1) for each in folder.glob("*/" * depth + "checkpoints")]
    found = sorted(each for each in below if store.step_folders(each) or list(leftovers(each)))
    if not found:
        raise ConfigError(f"{path} holds no checkpoint; give a run folder, or a folder of runs")
    return found


def checkpoints(path: str) -> list[Path]:
    """Return the step folders at `path`, newest first within a run, without reading them. Raises ConfigError."""
    folder = existing(path, "; give a run folder or a checkpoint folder")
    if is_step(folder):
        return [folder]
    found = [each for root in roots(path) for each in store.step_folders(root)]
    if not found:
        raise ConfigError(f"{path} holds no checkpoint; give a run folder or a checkpoint folder")
    return found


def one_checkpoint(path: str) -> Path:
    """Return the checkpoint at `path`. For a run, this is the newest intact one, or the newest if none is intact.

    Only file sizes are checked. Raises ConfigError if there is no checkpoint, or if `path` has several runs.
    """
    folders = checkpoints(path)
    if len({each.parent for each in folders}) > 1:
        raise ConfigError(f"{path} is a folder of several runs; give one of them")
    for folder in folders if len(folders) > 1 else []:
        if not (reason := damage(folder, log)):
            return folder
        log(f"checkpoint: skipped {folder}: {reason}")
    return folders[0]


def leftovers(root: Path) -> Iterator[Path]:
    """Yield folders that are being written or deleted, or were left by a dead process, and checkpoints set aside."""
    for pattern in LEFT:
        yield from sorted(root.glob(pattern))


def has_writer(root: Path) -> bool | None:
    """Return True if a process holds the writers' lock of `root`; None if the file system has no locks."""
    if not (root / ".lock").exists():
        return False
    with open_regular(root / ".lock") as lock:
        alone = try_lock(lock)
    return None if alone is None else not alone


def size_on_disk(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder."""
    total = 0
    for each in [path] if path.is_file() else path.rglob("*"):
        with suppress(OSError):  # deleted in the meantime
            total += each.stat().st_size if each.is_file() else 0
    return total


def checkpoint_config(folder: Path) -> dict[str, Any]:
    """Return the configuration in a checkpoint. Raises DamagedCheckpoint or ConfigError."""
    return config_of(read_file(folder, "config.yaml").decode("utf-8"), str(folder / "config.yaml"))


def config_of(text: str, where: str) -> dict[str, Any]:
    """Return a configuration as nested dicts, without importing plugins.

    Defaults are filled in, unless this version of gptlite cannot read the text or its plugins are not imported.
    """
    try:
        return to_dict(from_yaml(text))
    except ConfigError:
        try:
            refuse_yaml(text)
            raw = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        except Exception as error:
            raise ConfigError(f"{where} is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(raw, dict) or "model" not in raw:
        raise ConfigError(f"{where} is not a run's config.yaml")
    return {str(key): value for key, value in raw.items()}


def when(created: str) -> tuple[str, str]:
    """Return a manifest's `created` in UTC to the minute, and its age. An unreadable value is returned unchanged."""
    try:
        then = datetime.fromisoformat(created)
        age = (datetime.now(UTC) - then).total_seconds()
    except (TypeError, ValueError):
        return str(created), ""
    return f"{then.astimezone(UTC):%Y-%m-%d %H:%M}", format_duration(max(0, age))
