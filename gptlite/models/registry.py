"""Registry of models. Does not import torch."""

from typing import Any

from gptlite.errors import ConfigError
from gptlite.models.base import BaseSpec
from gptlite.models.config import ModelConfig
from gptlite.models.gpt.spec import GPTSpec

# Global on purpose: a plugin adds its model when it is imported.
SPECS: list[BaseSpec] = [GPTSpec()]
SCHEMAS: dict[str, type[ModelConfig]] = {f"{spec.name}_schema": spec.schema for spec in SPECS}
PRESETS: list[str] = []  # names of registered models: `model=<name>` has the schema's default values


def spec_of(config: Any) -> BaseSpec:
    """Return the spec of a model's configuration. Raises TypeError for a class without one."""
    for spec in SPECS:
        if spec.schema is type(config):
            return spec
    raise TypeError(f"{type(config).__name__} is not the configuration of a registered model")


def register_model(spec: BaseSpec) -> None:
    """Add a model, and a preset with the model's name and the default values of its schema. Raises ConfigError if
    the name is taken.

    A plugin calls it when it is imported; a second call for the same model has no effect.
    """
    from hydra.core.config_store import ConfigStore

    key = f"{spec.name}_schema"
    if taken := SCHEMAS.get(key):
        if (taken.__module__, taken.__qualname__) == (spec.schema.__module__, spec.schema.__qualname__):
            return
        raise ConfigError(f"the model {spec.name} is already registered by {taken.__module__}; choose another name")
    if not (isinstance(spec.schema, type) and issubclass(spec.schema, ModelConfig)):
        raise ConfigError(
            f"model={spec.name}: schema={spec.schema!r} does not extend gptlite.models.config.ModelConfig"
        )
    # A configuration's class identifies its model.
    if others := [each.name for each in SPECS if each.schema is spec.schema]:
        raise ConfigError(
            f"model={spec.name}: {spec.schema.__name__} is the schema of model={others[0]}; define another dataclass"
        )
    SPECS.append(spec)
    SCHEMAS[key] = spec.schema
    PRESETS.append(spec.name)
    store = ConfigStore.instance()
    store.store(group="model", name=key, node=spec.schema)
    store.store(group="model", name=spec.name, node=spec.schema)
