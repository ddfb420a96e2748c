"""Registry of optimizers. This module does not import torch."""

from gptlite.errors import ConfigError
from gptlite.optimizer.config import OPTIMIZERS, OptimizerConfig

# Global state, since a plugin registers its optimizer when it is imported.
SCHEMAS: dict[str, type[OptimizerConfig]] = {f"{name}_schema": kind for name, kind in OPTIMIZERS.items()}


def register_optimizer(name: str, kind: type[OptimizerConfig], preset: bool = True) -> None:
    """Register an optimizer, and a preset of its name with the class's defaults, unless `preset` is False.

    A plugin calls this when it is imported. Calling it again for the same class has no effect. Raises ConfigError if
    the name is taken.
    """
    from hydra.core.config_store import ConfigStore

    taken = OPTIMIZERS.get(name)
    if taken is not None and (taken.__module__, taken.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ConfigError(f"an optimizer named {name} is already registered by {taken.__module__}; use another name")
    OPTIMIZERS[name] = SCHEMAS[f"{name}_schema"] = kind
    store = ConfigStore.instance()
    store.store(group="optimizer", name=f"{name}_schema", node=kind)
    if preset:
        store.store(group="optimizer", name=name, node=kind)


def optimizer_name(kind: type[OptimizerConfig]) -> str:
    """Return the name of an optimizer's preset, or a name derived from the class if it is not registered."""
    names = {its: name for name, its in OPTIMIZERS.items()}
    return names.get(kind, kind.__name__.removesuffix("Config").lower())


def elementwise_optimizers() -> str:
    """Return `optimizer=adamw, optimizer=adam, ...`: the optimizers that can step any piece of a parameter."""
    return ", ".join(f"optimizer={name}" for name, kind in OPTIMIZERS.items() if kind.elementwise)
