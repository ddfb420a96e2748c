"""Names of presets and keys, for messages and for the composition."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from gptlite.config.plugins import import_installed
from gptlite.config.schema import CONF_DIR, SCHEMAS, Config, RunConfig, prepared_folders
from gptlite.data import registry as data_registry
from gptlite.models import registry
from gptlite.optimizer import config as optimizers


def choices(group: str) -> str:
    """Return e.g. `choose optimizer=adam, adamw, sgd`."""
    return f"choose {group}={', '.join(presets_of(group))}"


def presets_of(group: str) -> list[str]:
    """Return the names of a group's presets, including those without a file: prepared folders, and registered datasets,
    models and optimizers."""
    names = sorted(file.stem for file in (CONF_DIR / group).glob("*.yaml"))
    others = {
        "data": lambda: [*data_registry.SOURCES, *prepared_folders()],
        "model": lambda: registry.PRESETS,
        "optimizer": lambda: optimizers.OPTIMIZERS,
    }
    return names + [name for name in others.get(group, list)() if name not in names]


def known_keys() -> list[str]:
    """Return every key that any preset can have, such as `model.dropout`."""
    import_installed()  # their presets too
    return sorted({key for key, _ in _keys(Config, "")})


def whole_number_keys() -> set[str]:
    """Return the keys of `known_keys` whose values are whole numbers, or null."""
    import_installed()
    kinds = {int, int | None, "int", "int | None"}
    return {key for key, kind in _keys(Config, "") if kind in kinds}


def _keys(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield each key of a dataclass and its sections, and the type of its value as in the source."""
    for item in dataclasses.fields(cls):
        yield prefix + item.name, item.type
        if prefix == "" and item.name in SCHEMAS:
            for schema in SCHEMAS[item.name].values():
                yield from _keys(schema, f"{item.name}.")
        elif item.name == "run":
            yield from _keys(RunConfig, "run.")
        elif isinstance(item.type, type) and dataclasses.is_dataclass(item.type):
            yield from _keys(item.type, f"{prefix}{item.name}.")
