"""Configuration: schema, composition, checks and serialisation.

`load` and `Config` are for scripts. Other code imports from the modules: training does not need the composition.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gptlite.config.compose import load
    from gptlite.config.schema import Config

__all__ = ["Config", "load"]
_MODULES = {"Config": "gptlite.config.schema", "load": "gptlite.config.compose"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
