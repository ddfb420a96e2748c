"""Registry of kinds of data, and of map-style datasets, which plugins define. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gptlite.data.config import DataConfig, DatasetConfig
from gptlite.errors import ConfigError
from gptlite.progress import Log

if TYPE_CHECKING:
    from gptlite.data.opened import OpenedData
    from gptlite.parallelism.mesh import Mesh


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary size. `assumed` explains a guessed `size`; it is empty if the size comes from the data."""

    size: int
    assumed: str = ""


@dataclass(frozen=True)
class DataKind:
    """Kind of data, for configurations of the class `schema` and of classes that extend it.

    `check(config)` raises ConfigError for invalid settings. It runs before anything is written, and reads no data.
    `open(config, seed, log, mesh)` checks the settings and returns the data of a run. All ranks of `mesh` call it.
    `vocabulary(config, log)` returns the vocabulary size before the data is opened.
    `why_changed(config)` returns a clause for the message that a resumed run's data has changed; empty if no cause is
    known.
    """

    schema: type[DataConfig]
    check: Callable[[Any], None]
    open: Callable[[Any, int, Log, Mesh], OpenedData]
    vocabulary: Callable[[Any, Log], Vocabulary] | None = None
    why_changed: Callable[[Any], str] = lambda _: ""


@dataclass(frozen=True)
class DataSource:
    """Registered dataset: `schema` is the class of its configuration, and `open` returns its samples.

    `open(config)` returns (training, validation). Each is a map-style dataset; validation may also be a dict of them.
    """

    name: str
    schema: type[DatasetConfig]
    open: Callable[[Any], tuple[Any, Any]]


# Global on purpose: a package adds its kinds and datasets when it is imported.
KINDS: dict[type[DataConfig], DataKind] = {}
SOURCES: dict[str, DataSource] = {}
SCHEMAS: dict[str, type] = {}  # that presets can extend


def register_kind(kind: DataKind, name: str | None = None) -> None:
    """Register a kind of data that comes with gptlite. Presets extend its schema as `<name>_schema`.

    A user's plug-in registers a dataset, with `register_data`. Raises ConfigError if another schema has the name.
    """
    if name is not None and SCHEMAS.setdefault(f"{name}_schema", kind.schema) is not kind.schema:
        taken = SCHEMAS[f"{name}_schema"].__module__
        raise ConfigError(f"data={name} comes with gptlite, but is registered by {taken}; choose another name there")
    KINDS[kind.schema] = kind


def find_kind(config: DataConfig) -> DataKind | None:
    """Return the kind of data of a configuration, or None."""
    return next((KINDS[schema] for schema in type(config).__mro__ if schema in KINDS), None)


def kind_of(config: DataConfig) -> DataKind:
    """Return the kind of data of a configuration. Raises ConfigError if there is none."""
    if kind := find_kind(config):
        return kind
    if type(config) is not DataConfig:
        name = type(config).__name__
        raise ConfigError(f"no kind of data is registered for {name}; call gptlite.config.plugins.import_included()")
    raise ConfigError(
        "no data source is set; choose data=shakespeare, data=text data.path=..., "
        "data=tokens data.path=..., or data=synthetic"
    )


def register_data(name: str, schema: type[DatasetConfig], open: Callable[[Any], tuple[Any, Any]]) -> None:
    """Register a dataset, and add the preset `data=<name>` with the default values of its schema.

    A plugin calls this when it is imported; a second call for the same dataset has no effect. Raises ConfigError if the
    name or the schema is in use, or if the schema does not extend DatasetConfig.
    """
    from hydra.core.config_store import ConfigStore

    if not (isinstance(schema, type) and issubclass(schema, DatasetConfig)):
        raise ConfigError(f"data={name}: {schema!r} does not extend gptlite.data.config.DatasetConfig")
    key = f"{name}_schema"
    if taken := SCHEMAS.get(key):
        if (taken.__module__, taken.__qualname__) == (schema.__module__, schema.__qualname__):
            return
        raise ConfigError(f"a dataset named {name} is already registered by {taken.__module__}; choose another name")
    # `source_of` finds a dataset by the class of its configuration, so two datasets cannot share one.
    if others := [each.name for each in SOURCES.values() if each.schema is schema]:
        raise ConfigError(
            f"data={name}: {schema.__name__} is the schema of data={others[0]}; define a dataclass for each"
        )
    SOURCES[name], SCHEMAS[key] = DataSource(name, schema, open), schema
    store = ConfigStore.instance()
    store.store(group="data", name=key, node=schema)
    store.store(group="data", name=name, node=schema)


def source_of(config: DatasetConfig) -> DataSource:
    """Return the dataset registered for the class of `config`. Raises ConfigError if there is none."""
    for source in SOURCES.values():
        if source.schema is type(config):
            return source
    raise ConfigError(f"no dataset is registered for the configuration {type(config).__name__}; call register_data")
