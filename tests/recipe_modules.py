"""Recipes as modules, for their tests."""

import importlib.util
import sys
from types import ModuleType

from gptlite.satellites.corpus.recipes import find_recipe


def load_recipe(corpus: str) -> ModuleType:
    """data/<corpus>/prepare.py, which nothing imports."""
    spec = importlib.util.spec_from_file_location(f"{corpus}_prepare", find_recipe(corpus))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
