"""Registry of map-style datasets, which plugins define. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gptlite.data.config import CorpusConfig, DatasetConfig, SyntheticConfig, TextConfig, TokensConfig
from gptlite.errors import ConfigError


@dataclass(frozen=True)
class DataSource:
    """Registered dataset: `schema` is the class of its configuration, and `open` returns its samples.

    `open(config)` returns (training, validation). Each is a map-style dataset; validation may also be a dict of them.
    """

    name: str
    schema: type[DatasetConfig]
    open: Callable[[Any], tuple[Any, Any]]


# Global on purpose: a plugin adds its dataset when it is imported.
SOURCES: dict[str, DataSource] = {}
SCHEMAS: dict[str, type] = {
    "text_schema": TextConfig,
    "corpus_schema": CorpusConfig,
    "tokens_schema": TokensConfig,
    "synthetic_schema": SyntheticConfig,
}


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
