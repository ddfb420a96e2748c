"""Configuration: schema, composition, checks and serialisation."""

from gptlite.config.compose import help_text, load, load_layout, require_config, resumed, typed, with_vocabulary
from gptlite.config.length import with_epochs
from gptlite.config.overrides import hydra_value
from gptlite.config.saved import (
    from_yaml,
    leaves,
    override_value,
    read_saved,
    saved_overrides,
    to_dict,
    to_yaml,
)
from gptlite.config.schema import CONF_DIR, SCHEMAS, Config, choices, model_name, presets_of, register

__all__ = [
    "CONF_DIR",
    "SCHEMAS",
    "Config",
    "choices",
    "from_yaml",
    "help_text",
    "hydra_value",
    "leaves",
    "load",
    "load_layout",
    "model_name",
    "override_value",
    "presets_of",
    "read_saved",
    "register",
    "require_config",
    "resumed",
    "saved_overrides",
    "to_dict",
    "to_yaml",
    "typed",
    "with_epochs",
    "with_vocabulary",
]
