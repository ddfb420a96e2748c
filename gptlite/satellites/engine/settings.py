"""Configuration of an engine, composed from the arguments of `gptlite.initialize`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from gptlite.config.compose import load
from gptlite.config.overrides import hydra_value, key_of
from gptlite.config.plugins import as_override, named_in
from gptlite.config.schema import Config
from gptlite.errors import ConfigError
from gptlite.satellites.deepspeed import with_deepspeed

PLUGIN = "gptlite.satellites.engine.module"
# Keys and sections that have an effect outside the training loop of `pretrain`.
TAKEN = """
parallelism precision optimizer schedule ops seed plugins deepspeed run data.micro_batch_size
trainer.max_steps trainer.compile checkpoint.async_save checkpoint.keep checkpoint.keep_every checkpoint.timeout_seconds
""".split()
# Sections whose other keys have no effect.
LOOP = ("checkpoint", "cluster", "data", "experiment", "logger", "model", "trainer")


def compose(model: Any, optimizer: str, config: Iterable[str]) -> Config:
    """Return the complete configuration. Raises ConfigError if the model is not an nn.Module, and for invalid keys."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={model!r:.60} is {type(model).__name__}; give an nn.Module")
    if not isinstance(optimizer, str):
        raise ConfigError(f"optimizer={optimizer!r:.60} is {type(optimizer).__name__}; give a preset's name (adamw)")
    overrides = list(config)
    if isinstance(config, str) or not all(isinstance(each, str) for each in overrides):
        raise ConfigError(f"config={config!r:.60} is not a list of strings; give, e.g., config=['parallelism=zero2']")
    for key in map(key_of, overrides):
        if key.split(".")[0] in LOOP and key not in TAKEN:
            raise ConfigError(
                f"config: {key} has no effect outside gptlite's own training loop; initialize takes {', '.join(TAKEN)}"
            )
    plugins = [PLUGIN, *named_in(overrides)]
    base = ["model=module", "data=batches", "schedule=constant", as_override(plugins)]
    base += [f"model.name={hydra_value(type(model).__name__)}", f"optimizer={hydra_value(optimizer)}"]
    if isinstance(model, nn.Sequential):
        base.append(f"model.num_blocks={len(model)}")
    overrides = with_deepspeed([each for each in overrides if key_of(each) != "plugins"])
    if not any(key_of(each) == "schedule" for each in overrides):
        base.append("schedule.warmup_steps=0")
    settings = load([*base, *overrides])
    if settings.parallelism.auto:
        raise ConfigError("parallelism=auto: the planner needs a model that reads tokens; give a preset, such as zero2")
    return settings
