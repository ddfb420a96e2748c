"""The models there are. No torch here."""

from gptlite.errors import ConfigError
from gptlite.models.config import ModelConfig
from gptlite.models.gpt.spec import GPTSpec
from gptlite.models.spec import ModelSpec

# A registry is global by nature: a plugin adds to it when it is imported.
SPECS: list[ModelSpec] = [GPTSpec()]
SCHEMAS: dict[str, type[ModelConfig]] = {f"{spec.name}_schema": spec.schema for spec in SPECS}
PRESETS: list[str] = []  # of registered models, `model=<name>` with its schema's own values


def register_model(spec: ModelSpec) -> None:
    """Adds a model, with a preset of its name that has its schema's values. Raises ConfigError for a taken name.

    To be called by a plugin when it is imported; again for the same model it does nothing.
    """
    from hydra.core.config_store import ConfigStore

    key = f"{spec.name}_schema"
    if taken := SCHEMAS.get(key):
        if (taken.__module__, taken.__qualname__) == (spec.schema.__module__, spec.schema.__qualname__):
            return
        raise ConfigError(f"a model {spec.name} is registered already, by {taken.__module__}; give it another name")
    SPECS.append(spec)
    SCHEMAS[key] = spec.schema
    PRESETS.append(spec.name)
    store = ConfigStore.instance()
    store.store(group="model", name=key, node=spec.schema)
    store.store(group="model", name=spec.name, node=spec.schema)
