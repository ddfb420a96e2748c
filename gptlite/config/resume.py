"""Overrides of a run that is resumed, from the configuration in its folder."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from gptlite.config.overrides import hydra_value, key_of, values_of
from gptlite.config.plugins import refuse_foreign
from gptlite.config.saved import read_saved
from gptlite.config.schema import Config
from gptlite.errors import known_home

RESUMING = {"run", "trainer", "checkpoint", "plugins"}  # sections in which a command changes a run that it resumes
LENGTHS = ("trainer.max_steps", "trainer.max_epochs")  # setting one replaces the other


def saved_config(arguments: list[str]) -> Config | None:
    """Return the configuration of the run in `run.dir`; None if there is no run. Raises as `read_saved`."""
    saved = saved_file(arguments)
    return read_saved(saved) if values_of(arguments).get("run.dir") and saved.exists() else None


def saved_overrides(arguments: list[str], config: Config | None = None) -> list[str]:
    """Return the stored overrides of the run in `run.dir`, except for keys that `arguments` set; [] if there is no run.

    With these, `gptlite train run.dir=outputs/mine` resumes that run with its own configuration. `config` is the run's,
    if it has been read. Raises ConfigError if the configuration cannot be read, and PluginsNotNamed if it has plugins
    that have not been imported.
    """
    config = config or saved_config(arguments)
    if config is None:
        return []
    run, settings, saved = config.run, values_of(arguments), saved_file(arguments)
    refuse_foreign(run.overrides, saved.parent, settings)
    candidates = [*run.overrides, f"run.name={hydra_value(run.name)}"]
    kept = {key_of(c): c for c in candidates}
    for new, old in (LENGTHS, LENGTHS[::-1]):
        if settings.get(new, "null") != "null":
            kept.pop(old, None)
    # If `arguments` choose a preset, drop the group's saved keys too, since the new preset may not have them.
    kept = {key: c for key, c in kept.items() if key not in settings and key.partition(".")[0] not in settings}
    if any((saved.parent / "checkpoints").glob("step-*")):
        # The run resumes from its own checkpoints, not from the one it started from.
        kept = {key: c for key, c in kept.items() if key not in ("checkpoint.resume", "checkpoint.load")}
    return list(kept.values())


def saved_file(arguments: list[str]) -> Path:
    """Return the path of the config.yaml in `run.dir`."""
    with known_home("run.dir"):
        return Path(values_of(arguments).get("run.dir", "")).expanduser() / "config.yaml"


def not_resumed(arguments: list[str]) -> str:
    """Return a line for a command that looks like one to resume a run, although `run.dir` holds no run; else ""."""
    given, saved = values_of(arguments), saved_file(arguments)
    sections = {key.partition(".")[0] for key in given}
    if "run.dir" not in given or not sections <= RESUMING or "checkpoint.resume" in given or saved.exists():
        return ""
    folder = saved.parent
    runs = {each.parent.name: str(each.parent) for each in folder.parent.glob("*/config.yaml")}
    close = get_close_matches(folder.name, runs, n=1)
    hint = f"; did you mean run.dir={hydra_value(runs[close[0]])}?" if close else ""
    return f"note: run.dir={folder} holds no run, so nothing is resumed, and a new run starts there{hint}"
