"""Checks of thousands of configurations, composed once, then set and checked as `load` checks them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from copy import deepcopy
from enum import Enum
from functools import cache
from typing import Any

from gptlite.config.batch import check_world
from gptlite.config.checks import check
from gptlite.config.compose import load
from gptlite.config.schema import SCHEMAS, Config
from gptlite.errors import ConfigError
from gptlite.launch.launcher import with_known_vocabulary
from gptlite.parallelism.layout import wanted_world
from gptlite.satellites.certify.fuzz.axes import BASE, replaced


def refusal(overrides: Sequence[str]) -> str:
    """Return the message with which a configuration is refused before any rank starts; empty if it is legal.

    The overrides are those of a run, as `axes.overrides` gives them. An exception other than ConfigError, which is a
    fault of the checks, is raised.
    """
    try:
        config = load(overrides) if _has_layout_preset(overrides) else composed(overrides)
        check(config)
        check_world(with_known_vocabulary(config, guess=False), wanted_world(config.parallelism, gpus=0))
    except ConfigError as error:
        return str(error)
    return ""


def composed(overrides: Sequence[str]) -> Config:
    """Return the configuration that `load` composes, not checked: presets first, then values, in a tenth of the time.

    Raises ConfigError for a value of another type, as `load` does.
    """
    config = deepcopy(_base())
    presets = [each for each in overrides if "." not in each.partition("=")[0] and each not in BASE]
    for group, _, name in (each.partition("=") for each in presets):
        if group in SCHEMAS:
            setattr(config, group, deepcopy(getattr(_preset(group, name), group)))
    for each in overrides:
        key, _, value = each.partition("=")
        if key not in SCHEMAS:
            _set(config, key, value)
    return config


def has_key(group: str, preset: str, key: str) -> bool:
    """Return True if a preset of a group has a key, such as `optimizer.momentum`."""
    try:
        return hasattr(getattr(_preset(group, preset), group), key.split(".")[1])
    except ConfigError:  # a preset that needs further keys
        return True


def _has_layout_preset(overrides: Sequence[str]) -> bool:
    """Return True for presets that can need keys of their own, such as a folder, and so cannot be composed alone."""
    return any(each.startswith(("parallelism=", "data=text", "model=moe")) for each in overrides)


@cache
def _base() -> Config:
    return load(BASE)


@cache
def _preset(group: str, name: str) -> Config:
    return load(replaced([f"{group}={name}"]))


def _set(config: Any, key: str, value: str) -> None:
    """Set a key to the value that is written on a command line. Raises ConfigError if the section has no such key."""
    *sections, name = key.split(".")
    for section in sections:
        config = getattr(config, section)
    if not hasattr(config, name):
        raise ConfigError(f"{key} is not a key of the chosen preset; leave it out")
    now, plain = getattr(config, name), _plain(value)
    if isinstance(now, Enum):
        plain = type(now)(value)
    elif isinstance(now, float) and isinstance(plain, int):
        plain = float(plain)
    setattr(config, name, plain)


def _plain(value: str) -> Any:
    """Return the number, list, bool or None that a text is, or the text."""
    if value in ("null", "true", "false") or re.fullmatch(r"\[.*\]|-?\d+(\.\d*)?(e-?\d+)?", value):
        return json.loads(value)
    return value
