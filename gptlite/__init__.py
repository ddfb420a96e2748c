"""gptlite: a Hydra-configured, Megatron-style GPT pretraining framework. Start reading at `pretrain.py`.

`load`, `pretrain`, `launch` and `initialize` are the Python API, which docs/python.md describes.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gptlite.config.schema import Config
    from gptlite.errors import ConfigError
    from gptlite.satellites.engine.engine import Engine, initialize
    from gptlite.start.api import RunFailed, launch
    from gptlite.start.load import load
    from gptlite.start.pretrain import pretrain
    from gptlite.trainer.result import Result

__all__ = ["Config", "ConfigError", "Engine", "Result", "RunFailed", "initialize", "launch", "load", "pretrain"]
__version__ = "0.1.0"

# The module of each public name. It is imported when the name is first used: `gptlite --help` needs no torch or Hydra.
_PUBLIC = {
    "Config": "gptlite.config.schema",
    "ConfigError": "gptlite.errors",
    "Engine": "gptlite.satellites.engine.engine",
    "Result": "gptlite.trainer.result",
    "RunFailed": "gptlite.start.api",
    "initialize": "gptlite.satellites.engine.engine",
    "launch": "gptlite.start.api",
    "load": "gptlite.start.load",
    "pretrain": "gptlite.start.pretrain",
}

# Subpackages whose source is beside this package: {installed name under `gptlite`: folder in the source tree}.
_BESIDE = {"kernels": "kernels", "recipes": "data"}


class _Package(ModuleType):
    """Type of this module, which imports public names lazily.

    `pretrain` and `launch` are functions, and importing the submodules gptlite.pretrain and gptlite.launch would
    replace them by modules. This type ignores such an assignment. `from gptlite.pretrain import ...` still works, since
    it takes the module from sys.modules; the function there is the core's, to which nothing is attached.
    """

    def __getattr__(self, name: str) -> object:
        if name not in _PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_PUBLIC[name]), name)

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package


class _SourceTree:
    """Import finder for the subpackages in `_BESIDE`, if the source tree is on `sys.path` but not installed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of `gptlite.kernels` or `gptlite.recipes`; None for other modules."""
        parent, _, child = name.rpartition(".")
        folder = self.root / _BESIDE.get(child, "")
        if parent != __name__ or child not in _BESIDE or not (folder / "__init__.py").is_file():
            return None
        return spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])


if (_root := Path(__file__).parents[1]) and (_root / "pyproject.toml").is_file():
    sys.meta_path.insert(0, _SourceTree(_root))
