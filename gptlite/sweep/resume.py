"""What a sweep's folder remembers of its command line, so that the folder is enough to go on."""

from __future__ import annotations

from pathlib import Path

from gptlite.errors import ConfigError
from gptlite.sweep.folder import SweepFolder

DIR = "hydra.sweep.dir"


def sweep_overrides(arguments: list[str]) -> list[str]:
    """The overrides of a sweep: those given, or the remembered ones of the sweep in `hydra.sweep.dir`.

    `run.dir` is taken for hydra.sweep.dir, and `sweep=` for `+sweep=`. Raises ConfigError for a folder with another
    sweep, or with none where nothing else is given.
    """
    arguments = [f"+{each}" if each.startswith("sweep=") else each for each in arguments]
    if not any(_key(each) == DIR for each in arguments):
        arguments = [f"{DIR}{each.removeprefix('run.dir')}" if _key(each) == "run.dir" else each for each in arguments]
    where = [each.partition("=")[2].strip("'\"") for each in arguments if _key(each) == DIR]
    if not where:
        return arguments
    folder = SweepFolder(Path(where[-1]).expanduser())
    arguments = [f"{each.partition('=')[0]}={_expanded(each)}" if _key(each) == DIR else each for each in arguments]
    header = folder.header
    task, hydra = _sorted(arguments)
    if not header:
        if not task:
            raise ConfigError(f"{DIR}={where[-1]} holds no sweep to go on with; give overrides to start one there")
        return arguments
    if task:
        refuse_others(folder, task)
    given = {_key(each) for each in hydra}
    kept = [each for each in header.get("hydra", []) if not {_key(each), _group(each)} & given]
    return [*header.get("overrides", []), *kept, *hydra]


def refuse_others(folder: SweepFolder, overrides: list[str]) -> None:
    """Raises ConfigError where the folder has the sweep of other overrides."""
    if not (header := folder.header):
        return
    old, new = ({_key(each): each for each in them} for them in (header.get("overrides", []), overrides))
    for key in [*old, *new]:
        if old.get(key) != new.get(key):
            was, now = (each.get(key, f"no {key}") for each in (old, new))
            raise ConfigError(
                f"{DIR}={folder.path} holds another sweep: it has {was}, not {now}; "
                f"give {DIR} alone to go on with it, or another folder"
            )


def _sorted(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What is for the runs, and what is for Hydra."""
    hydra = [each for each in arguments if _key(each).startswith(("hydra.", "hydra/"))]
    return [each for each in arguments if each not in hydra], hydra


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _group(override: str) -> str:
    """`hydra/launcher` of `hydra.launcher.n_jobs=2`: another launcher has other keys."""
    return "/".join(_key(override).split(".")[:2])


def _expanded(override: str) -> str:
    value = override.partition("=")[2]
    return str(Path(value).expanduser()) if value.startswith("~") else value
