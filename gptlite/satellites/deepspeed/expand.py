"""Replacement of `deepspeed=FILE` on a command line by the file's overrides."""

from __future__ import annotations

import re

from gptlite.config.overrides import key_of, unquoted, values_of
from gptlite.errors import ConfigError
from gptlite.invocation import command
from gptlite.progress import Log
from gptlite.satellites.deepspeed.file import read
from gptlite.satellites.deepspeed.rows import Row, Verdict
from gptlite.satellites.deepspeed.translate import translate

GIVEN = re.compile(r"\+{0,2}deepspeed=(.*)", re.DOTALL)
# Keys that every preset of their group has. The JSON's values for them are kept if the command line chooses a preset.
COMMON = ("data.", "optimizer.clip_norm", "parallelism.data", "trainer.")


def expanded(overrides: list[str], log: Log | None = None) -> list[str]:
    """Return the JSON's overrides, except those that the rest of `overrides` replaces, followed by that rest.

    Raises ConfigError, which lists all keys that are refused.
    """
    files = [unquoted(match[1]) for each in overrides if (match := GIVEN.match(each))]
    if not files:
        return overrides
    if len(files) > 1:
        raise ConfigError(f"deepspeed={files[0]} and deepspeed={files[1]}: give one file")
    path, others = files[0], [each for each in overrides if not GIVEN.match(each)]
    values = values_of(others)
    data = values.get("parallelism.data", "")
    rows = translate(read(path), int(data) if data.isdecimal() else None, values)
    refuse(path, rows)
    if log:
        count = sum(row.verdict is Verdict.taken for row in rows)
        log(f"deepspeed: {count} of {len(rows)} keys of {path} are set; {command('import-config')} {path} lists them")
    return [*(each for each in overrides_of(rows) if not _replaced(each, values)), *others]


def overrides_of(rows: list[Row]) -> list[str]:
    """Return the overrides of all rows. If several rows set a key, the last one applies."""
    found = {key_of(each): each for row in rows for each in row.overrides}
    return list(found.values())


def refuse(path: str, rows: list[Row]) -> None:
    """Raise ConfigError if any row is refused, with the reason for each."""
    reasons = [f"{row.text}: {row.reason}" for row in rows if row.verdict is Verdict.refused]
    if reasons:
        raise ConfigError(f"deepspeed={path} is refused: {'; '.join(reasons)}")


def _replaced(override: str, values: dict[str, str]) -> bool:
    """Return True if the command line replaces `override`: it sets the same key, or chooses a preset for the key's
    group, and not every preset of that group has the key."""
    key = key_of(override)
    return key in values or (key.partition(".")[0] in values and not key.startswith(COMMON))
