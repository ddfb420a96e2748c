"""Help on sweeps, and on one group of the configuration: each key with its value, type, range and comment."""

from __future__ import annotations

import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, get_args, get_type_hints

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from gptlite.config.bounds import BOUNDS, FINITE, LARGEST, SOME
from gptlite.config.keys import choices, presets_of
from gptlite.config.schema import CONF_DIR, SCHEMAS, Config
from gptlite.errors import ConfigError, did_you_mean, printable
from gptlite.invocation import localized
from gptlite.limits import INTEGER, RANKS, SIZE
from gptlite.models.registry import SPECS
from gptlite.parallelism.axes import every_axis

KINDS = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}
WIDTH = 80


SWEEP_HELP = """\
gptlite sweep: one run for each combination of values, and a report that
compares them.

gptlite sweep optimizer.lr=1e-3,3e-3 model=gpt2,gpt-lite
    any key or group may have several values, separated by commas
gptlite sweep 'trainer.max_steps=range(100,500,100)'
    a range, in quotes for the shell
gptlite sweep sweep=parallelism trainer.max_steps=20
    a preset: {presets}
gptlite sweep hydra.sweep.dir=outputs/sweeps/NAME ...
    the folder of the sweep; given alone, the folder of an earlier sweep
    continues that sweep
gptlite sweep hydra/launcher=joblib ...
    several runs at a time, after pip install hydra-joblib-launcher

Other KEY=VALUE arguments are those of train, and apply to every run.
Combinations that cannot run are left out, with the reason. The folder has a
run folder for each combination, sweep.csv and sweep.html. After Ctrl-C, the
command that continues the sweep is printed."""


def sweep_help() -> str:
    """Return the help on sweeps."""
    return localized(SWEEP_HELP).format(presets=", ".join(presets_of("sweep")))


def group_help(name: str, overrides: list[str]) -> str:
    """Return the help on a group, such as `trainer`, or on one key, for the presets that `overrides` choose.

    Raises ConfigError for another name.
    """
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        config = compose("config", overrides=overrides)
    group, _, key = name.partition(".")
    sections = [each.name for each in fields(Config) if OmegaConf.is_dict(config.get(each.name))]
    if group not in sections:
        hint = did_you_mean(group, sections) or f"; the groups are {', '.join(sections)}"
        raise ConfigError(f"--help {name}: {group} is not a group{hint}")
    section = config[group]
    schema = OmegaConf.get_type(section)
    assert schema is not None
    lines = [line for each, text in _keys(section, schema, f"{group}.") if each.startswith(name) for line in text]
    if not lines and key:
        raise ConfigError(f"--help {name}: the chosen preset has no such key{did_you_mean(key, list(section))}")
    chosen = [choices(group)] if group in SCHEMAS else []
    about = [] if key else [*textwrap.wrap(inspect.cleandoc(schema.__doc__ or "").split("\n\n")[0], WIDTH), ""]
    return "\n".join([*(line for text in chosen for line in textwrap.wrap(text, WIDTH)), *about, *lines])


def _keys(section: DictConfig, schema: type, prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each key of a section, with lines for its value, type, range and comment."""
    kinds, comments = get_type_hints(schema), _comments(schema)
    for item in fields(schema):
        key, kind = prefix + item.name, kinds[item.name]
        if item.name not in section:
            continue
        if is_dataclass(kind):
            yield from _keys(section[item.name], OmegaConf.get_type(section[item.name]) or kind, f"{key}.")  # type: ignore[arg-type]
            continue
        value = OmegaConf.to_container(section, resolve=False, enum_to_str=True)[item.name]  # type: ignore[index, call-overload]
        words = ", ".join(filter(None, (_kind(kind), _range(key, item.name, schema))))
        text = f"({words}) {comments.get(item.name, '')}".strip()
        wrapped = textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ")
        yield key, [f"{key}={'null' if value is None else _plain(value)}", *wrapped]


def _plain(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else printable(value)


def _kind(kind: Any) -> str:
    """Return a type in words, e.g. `whole number or null`, `none, selective or full`."""
    if parts := [each for each in get_args(kind) if not isinstance(each, str)]:
        origin = getattr(kind, "__origin__", None)
        if origin in (list, dict):
            return f"{'list' if origin is list else 'mapping'} of {' to '.join(map(_kind, parts))}"
        return " or ".join(map(_kind, parts))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " | ".join(each.name for each in kind)
    return KINDS.get(kind, getattr(kind, "__name__", str(kind)))


def _range(key: str, name: str, schema: type) -> str:
    """Return the legal values of a key, "" if any are legal or the check depends on other keys."""
    if found := getattr(schema, "ranges", {}).get(name):
        return found.fix.removeprefix("must be ")
    named = next((spec.positive for spec in SPECS if spec.schema is schema), ())
    positive = {f"model.{each}": LARGEST.get(each, SIZE) for each in named}
    degrees = {f"parallelism.{axis.key}": RANKS for axis in every_axis()}
    for section, keys, least, most, _ in BOUNDS:
        if key in (f"{section}{each}" for each in keys.split()):
            return _between(least, most)
    most = (positive | degrees).get(key)
    return _between(1, most) if most else ""


def _between(least: float, most: float) -> str:
    start = "above 0" if least == SOME else f"at least {least:,}"
    return start if most in (INTEGER, FINITE) else f"{start} and at most {most:,}"


@cache
def _comments(schema: type) -> dict[str, str]:
    """Return the comments after the fields of a dataclass and its bases, in their source."""
    comments: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        if not is_dataclass(base):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):  # without source, such as a class of a notebook
            continue
        lines = source.splitlines()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                comments[lines[token.start[0] - 1].partition(":")[0].strip()] = token.string.lstrip("# ")
    return comments
