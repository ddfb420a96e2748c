"""gptlite: a Hydra-configured, Megatron-style GPT pretraining framework. Start reading at `pretrain.py`."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

__version__ = "0.1.0"

# Packages that are siblings of this one in the source tree, by their installed names in pyproject.toml.
_BESIDE = {"kernels": "kernels", "recipes": "data"}


class _SourceTree:
    """Import finder for the packages in `_BESIDE`, for a source tree that is on the path but not installed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of the package `gptlite.kernels` or `gptlite.recipes`, else None."""
        parent, _, child = name.rpartition(".")
        folder = self.root / _BESIDE.get(child, "")
        if parent != __name__ or child not in _BESIDE or not (folder / "__init__.py").is_file():
            return None
        return spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])


if (_root := Path(__file__).parents[1]) and (_root / "pyproject.toml").is_file():
    sys.meta_path.insert(0, _SourceTree(_root))
