"""Hydra's `compose`, from presets that are composed once: a fifth of the quick tests' time went into composing them.

    compose("config", overrides=["model=gpt2", "seed=3"])   # as hydra.compose

The first composition of a choice of presets is Hydra's. Values are set on a copy of it by Hydra's own code. Anything
else, an error included, is Hydra's from the start. Tests of the configuration compose without this (conftest.py).
"""

import re
from copy import deepcopy
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from gptlite.config.schema import CONF_DIR, SCHEMAS, prepared_folders

CHOICE = re.compile(r"[a-z_]+")  # GROUP=PRESET
VALUE = re.compile(r"seed|plugins|[a-z_]+(\.\w+)+")
MOST = 200  # choices of presets that are kept

_composed: dict[Any, DictConfig] = {}


def compose(name: str, overrides: list[str]) -> DictConfig:
    """The configuration that hydra.compose gives."""
    keys = [each.partition("=")[0] for each in overrides]
    chosen = [each for key, each in zip(keys, overrides, strict=True) if not VALUE.fullmatch(key)]
    if not all(CHOICE.fullmatch(each.partition("=")[0]) for each in chosen) or not _is_ours():
        return hydra.compose(name, overrides=overrides)
    registered = tuple((group, *schemas.items()) for group, schemas in SCHEMAS.items())
    try:
        entry = name, *chosen, registered, *prepared_folders()
        if entry not in _composed:
            if len(_composed) >= MOST:
                _composed.clear()
            _composed[entry] = hydra.compose(name, overrides=chosen)
        config = deepcopy(_composed[entry])
        values = [each for key, each in zip(keys, overrides, strict=True) if VALUE.fullmatch(key)]
        ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(values), config)
    except Exception:  # Hydra's own words
        return hydra.compose(name, overrides=overrides)
    return config


def _is_ours() -> bool:
    """Whether Hydra has been initialized with the project's presets."""
    sources = GlobalHydra.instance().config_loader().get_search_path().get_path()
    return str(CONF_DIR) in [each.path.removeprefix("file://") for each in sources]
