"""Configuration of an engine, composed from the arguments of `gptlite.initialize`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from gptlite.config import Config, hydra_value, load
from gptlite.config.plugins import named_in
from gptlite.errors import ConfigError

PLUGIN = "gptlite.engine.module"
# Keys and sections that have an effect without the training loop of `pretrain`.
TAKEN = """
parallelism precision optimizer schedule ops seed plugins deepspeed run data.micro_batch_size
trainer.max_steps trainer.compile checkpoint.async_save checkpoint.keep checkpoint.keep_every checkpoint.timeout_seconds
""".split()
LOOP = ("checkpoint", "cluster", "data", "experiment", "logger", "model", "trainer")  # sections with other keys


def compose(model: object, optimizer: str, config: Iterable[str]) -> Config:
    """Return the complete configuration. Raises ConfigError for a model that is no module, and for invalid keys."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={model!r:.60} is {type(model).__name__}; give an nn.Module")
    if not isinstance(optimizer, str):
        raise ConfigError(f"optimizer={optimizer!r:.60} is {type(optimizer).__name__}; give a preset's name, as adamw")
    if isinstance(config, str):
        raise ConfigError(f"config={config!r}: the overrides are a list; give config=[{config!r}]")
    given = list(config)
    for key in (_key(each) for each in given):
        if key.split(".")[0] in LOOP and key not in TAKEN:
            raise ConfigError(
                f"config: {key} has no effect in a loop of one's own; initialize takes {', '.join(TAKEN)}"
            )
    base = [f"plugins=[{','.join([PLUGIN, *named_in(_strings(given))])}]", "model=module", "data=batches"]
    base += [f"model.name={hydra_value(type(model).__name__)}", f"optimizer={hydra_value(optimizer)}"]
    if isinstance(model, nn.Sequential):
        base.append(f"model.num_blocks={len(model)}")
    if not any(_key(each) in ("schedule", "deepspeed") for each in given):
        base += ["schedule=constant", "schedule.warmup_steps=0"]
    settings = load([*base, *(each for each in given if _key(each) != "plugins")])
    if settings.parallelism.auto:
        raise ConfigError("parallelism=auto: the planner needs a model that reads tokens; give another preset, as zero2")
    return settings


def _key(override: Any) -> str:
    return override.partition("=")[0].lstrip("+~") if isinstance(override, str) else ""


def _strings(given: list[Any]) -> list[str]:
    return [each for each in given if isinstance(each, str)]  # `load` refuses others
