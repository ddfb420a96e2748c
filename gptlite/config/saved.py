"""Serialised configurations, as stored in run folders and checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gptlite import limits
from gptlite.config.bounds import check_bounds
from gptlite.config.overrides import hydra_value, key_of
from gptlite.config.plugins import PluginsNotNamed, import_plugins, refuse_unnamed
from gptlite.config.schema import RENAMED, SCHEMAS, Config, schema_names
from gptlite.documents import DocumentError, checked, read_text, refuse_yaml, shown
from gptlite.errors import ConfigError
from gptlite.models.base import BaseSpec
from gptlite.models.registry import SPECS


class _Run(TypedDict):
    overrides: list[str]


class _Saved(TypedDict):
    """Keys that are read before the schemas are known, which check the others."""

    schemas: dict[str, str]
    run: _Run
    model: dict[str, Any]
    plugins: NotRequired[list[str]]


def to_dict(config: Config) -> dict[str, Any]:
    """Convert a configuration to nested dicts, with the names of enum members, for YAML, manifests and trackers."""
    # resolve=False: the values are already resolved, and interpolations in saved overrides must stay as typed.
    container = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True, resolve=False)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()} | {"schemas": schema_names(config)}


def to_yaml(config: Config) -> str:
    """Serialise the resolved configuration; `from_yaml` reads it back as an equal object."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)), sort_keys=False)


def from_yaml(text: str, where: object = "this configuration", *, imports: bool = False) -> Config:
    """Parse the result of `to_yaml`. Raises ConfigError if it is damaged or from another version.

    The configuration's plugins must have been imported; otherwise PluginsNotNamed is raised, with a message that begins
    with `where`. `imports=True` imports them instead. Use it only for a text from this process's launcher, on whose
    command line the plugins were requested.
    """
    try:
        refuse_yaml(text)
        raw: Any = checked(OmegaConf.to_container(OmegaConf.create(text), resolve=False), _Saved)
        # Overrides are set at the end, unresolved: they may contain interpolations, which merging would resolve.
        names, overrides = raw.pop("schemas"), raw["run"].pop("overrides")
        if interpolation := next(_interpolated(raw), None):
            raise ConfigError(
                f"{where}: {interpolation} is an interpolation, which a saved configuration does not have"
            )
        plugins = raw.get("plugins", [])
        import_plugins(plugins if imports else [])  # plugins may have registered the saved schemas
        refuse_unnamed(plugins, where)
        spec = _spec(names["model"])
        for section, keys in _renamed(spec).items():
            raw[section] = {
                keys.get(key, key): value for key, value in checked(raw.get(section), dict[str, Any], section).items()
            }
        removed = spec.removed if spec else {}
        for key, off in removed.items():
            if (value := raw["model"].pop(key, off)) != off:
                raise ConfigError(
                    f"{where} has model.{key}={shown(value)}, which this version of gptlite no longer has; "
                    "use the version that wrote it"
                )
        for group, name in names.items():
            if name not in SCHEMAS[group]:
                choice = f"{group}={name.removesuffix('_schema')}"
                raise ConfigError(
                    f"{where} has {choice}, which no plugin or installed package registers; install its package"
                )
        schemas = tuple((group, SCHEMAS[group][name]) for group, name in names.items())
        result = OmegaConf.to_object(OmegaConf.merge(_defaults(schemas), raw))
    except (OmegaConfBaseException, YAMLError, DocumentError, KeyError, TypeError, OverflowError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"a saved config.yaml is damaged or from another version of gptlite: {reason}") from error
    assert isinstance(result, Config)
    renamed = _renamed(spec)
    whole = {f"{section}.{old}=": f"{section}.{new}=" for section in renamed for old, new in renamed[section].items()}
    pattern = re.compile("|".join(map(re.escape, whole)))
    check_bounds(result)
    result.run.overrides = [
        pattern.sub(lambda found: whole[found[0]], each, count=1)
        for each in overrides
        if key_of(each) not in {f"model.{key}" for key in removed}
    ]
    return result


def _interpolated(value: Any, key: str = "") -> Iterator[str]:
    """Yield `key=value` for each interpolation, which could read environment variables and files, among the values."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in items:
        yield from _interpolated(each, f"{key}.{name}".lstrip("."))
    if isinstance(value, str) and "${" in value:
        yield f"{key}={value:.80}"


@cache
def _defaults(schemas: tuple[tuple[str, type], ...]) -> DictConfig:
    """Return the defaults of a configuration with these schemas of its sections; not to be changed."""
    base = OmegaConf.structured(Config)
    for group, schema in schemas:
        base[group] = schema
    return base


def _spec(schema: str) -> BaseSpec | None:
    """Return the spec of a model with this schema; None if no plugin or installed package registers it."""
    return next((spec for spec in SPECS if spec.schema is SCHEMAS["model"].get(schema)), None)


def _renamed(spec: BaseSpec | None) -> dict[str, Mapping[str, str]]:
    """Return the renamed keys, `{section: {former key: new key}}`, including those of a model."""
    return {**RENAMED, "model": spec.renamed if spec else {}}


def read_saved(path: Path) -> Config:
    """Read a run's config.yaml. Raises ConfigError, naming the file, if it cannot be read."""
    try:
        return from_yaml(read_text(path, limits.YAML_BYTES), path.parent)
    except PluginsNotNamed:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; move it away, or give another run.dir") from error


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for each field of a section. Keys of nested dataclasses are dotted paths."""
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, value


def override_value(value: Any) -> str:
    """Format a value of any type as the value of an override."""
    if isinstance(value, Enum):
        return value.name
    return hydra_value(value) if isinstance(value, str) else json.dumps(value)
