"""The optimizers there are. No torch here."""

from gptlite.errors import ConfigError
from gptlite.optimizer.config import OPTIMIZERS, OptimizerConfig

# A registry is global by nature: a plugin adds to it when it is imported.
SCHEMAS: dict[str, type[OptimizerConfig]] = {f"{name}_schema": kind for name, kind in OPTIMIZERS.items()}


def register_optimizer(name: str, kind: type[OptimizerConfig]) -> None:
    """Adds an optimizer, with a preset of its name that has its class's values. Raises ConfigError for a taken name.

    To be called by a plugin when it is imported; again for the same class it does nothing.
    """
    from hydra.core.config_store import ConfigStore

    taken = OPTIMIZERS.get(name)
    if taken is not None and (taken.__module__, taken.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ConfigError(f"an optimizer {name} is there already, of {taken.__module__}; give it another name")
    OPTIMIZERS[name] = SCHEMAS[f"{name}_schema"] = kind
    store = ConfigStore.instance()
    store.store(group="optimizer", name=f"{name}_schema", node=kind)
    store.store(group="optimizer", name=name, node=kind)


def optimizer_name(kind: type[OptimizerConfig]) -> str:
    """The name of an optimizer's preset; of a class that nobody registered its own."""
    names = {its: name for name, its in OPTIMIZERS.items()}
    return names.get(kind, kind.__name__.removesuffix("Config").lower())


def elementwise_optimizers() -> str:
    """`optimizer=adamw, optimizer=adam, ...`: those that can step any piece of a parameter."""
    return ", ".join(f"optimizer={name}" for name, kind in OPTIMIZERS.items() if kind.elementwise)
