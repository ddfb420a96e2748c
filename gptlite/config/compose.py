"""Composition of a checked configuration from overrides."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from gptlite.config.changed_presets import changed_presets
from gptlite.config.checks import check
from gptlite.config.keys import choices, presets_of, whole_number_keys
from gptlite.config.messages import refusals, unknown_key
from gptlite.config.overrides import NAMELESS, key_of, unquoted, whole_number
from gptlite.config.plugins import import_plugins, named_in, refuse_unnamed
from gptlite.config.resume import saved_config, saved_overrides
from gptlite.config.saved import leaves
from gptlite.config.schema import CONF_DIR, SCHEMAS, Config, register, schema_names
from gptlite.config.warm_start import with_model
from gptlite.errors import ConfigError, did_you_mean, known_home
from gptlite.invocation import localized
from gptlite.parallelism.config import ParallelismConfig

ELASTIC_KEY = "parallelism.data"  # with the value elastic: parallelism.elastic=true


def load(overrides: Iterable[str] = (), config_dir: Path = CONF_DIR) -> Config:
    """Return the configuration of a run with these overrides, `KEY=VALUE` and `GROUP=PRESET`.

    If `run.dir=FOLDER` is an existing run, the overrides are added to those of the run, as on the command line. Raises
    ConfigError.
    """
    overrides = as_overrides(overrides)
    import_plugins(named_in(overrides))  # before the composition, since plugins add schemas
    overrides = with_whole_numbers(with_elastic(overrides))
    overrides = with_model(resumed(overrides, config_dir))
    with refusals(), _initialized(config_dir):
        return typed(compose("config", overrides=overrides), overrides)


def as_overrides(overrides: Iterable[str]) -> list[str]:
    """Return a list of overrides. Raises ConfigError for a string, and for entries that are not overrides."""
    if isinstance(overrides, str):
        raise ConfigError(f"load({overrides!r}): the overrides must be a list; use load([{overrides!r}])")
    overrides = list(overrides)
    if flags := [each for each in overrides if not isinstance(each, str) or each.startswith("-")]:
        raise ConfigError(f"load takes strings KEY=VALUE and GROUP=PRESET, not {flags[0]!r}")
    return overrides


def resumed(overrides: list[str], config_dir: Path = CONF_DIR) -> list[str]:
    """Return the overrides, preceded by those of the run in `run.dir` if it exists.

    For values of the run that the current presets no longer have, overrides are added too. Raises ConfigError if the
    run's configuration cannot be read (see `saved_overrides`), or if the overrides cannot be composed with it.
    """
    register()
    saved = saved_config(overrides)
    if saved is None or not (stored := saved_overrides(overrides, saved)):
        return overrides
    with refusals(), _initialized(config_dir):
        more = changed_presets(saved, [*stored, *overrides], lambda each: compose("config", overrides=each))
    return [*more, *stored, *overrides]


def with_whole_numbers(overrides: list[str]) -> list[str]:
    """Return the overrides, with whole numbers that are written as 1e3 as Hydra reads them. To Hydra, 1e3 is 1000.0.

    Raises ConfigError for a group whose value is no name, for example a number, of which Hydra does not name the key.
    """
    for key, _, value in (each.partition("=") for each in overrides):
        if key_of(key) in (*SCHEMAS, "experiment", "sweep") and NAMELESS.fullmatch(value):
            raise ConfigError(f"{key}={value} is not the name of a preset; {choices(key_of(key))}")
    changed = ["".join((*parts[:2], whole_number(parts[2]))) for parts in (each.partition("=") for each in overrides)]
    if changed == overrides:
        return overrides
    keys = whole_number_keys()
    return [new if key_of(each) in keys else each for each, new in zip(overrides, changed, strict=True)]


def with_elastic(overrides: list[str]) -> list[str]:
    """Return the overrides with the keys for which `parallelism.data=elastic` is short. Raises ConfigError for another
    word than that, and for a sweep over it and numbers."""
    return [new for old in overrides for new in (_elastic(old) if key_of(old) == ELASTIC_KEY else [old])]


def _elastic(override: str) -> list[str]:
    """Return the overrides for one of `parallelism.data`."""
    key, _, value = override.partition("=")
    text = unquoted(value).lower()
    if text == "elastic":
        return [f"{key.removesuffix('data')}elastic=true", f"{key}=null"]
    if re.search(r"\belastic\b", text):
        raise ConfigError(f"{override}: a sweep takes elastic beside numbers as parallelism.elastic=true,false")
    if re.fullmatch("[a-z]+", text) and text != "null":
        hint = did_you_mean(text, ["elastic"])
        raise ConfigError(f"{override} is neither a number of data ranks nor elastic nor null{hint}")
    return [override]


def load_layout(overrides: Iterable[str]) -> ParallelismConfig:
    """Compose these overrides and return the section `parallelism`, for a command that does not train. Raises
    ConfigError."""
    register()
    overrides = with_elastic(list(overrides))
    with refusals(), _initialized(CONF_DIR):
        config = compose("config", overrides=overrides)
        layout = OmegaConf.to_object(config.parallelism)
    assert isinstance(layout, ParallelismConfig)
    _refuse_added_keys(config.parallelism, layout, "parallelism.")
    if layout.auto:
        raise ConfigError("parallelism=auto plans a training run; give a layout, e.g. parallelism=tp2")
    return layout


@contextmanager
def _initialized(config_dir: Path) -> Iterator[None]:
    """Context manager in which Hydra composes from a folder. On exit, it restores the Hydra instance that the
    caller has initialized, if any."""
    others, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        with initialize_config_dir(str(config_dir), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = others


HELP = """\
gptlite: GPT pretraining, composed by Hydra.

gptlite train                               train the default: gpt-lite-modern on Shakespeare
gptlite train GROUP=PRESET KEY=VALUE ...    change presets and values
gptlite train run.dir=outputs/...           resume a run
gptlite train deepspeed=ds_config.json      train with a DeepSpeed JSON
gptlite train --hostfile FILE ...           train on several machines: run this on each
gptlite train --help GROUP                  describe the keys of a group, e.g. --help trainer
gptlite train --cfg job                     print the configuration and stop
gptlite train --hydra-help                  Hydra's own options

Groups and their presets (GROUP=PRESET):
{presets}

The configuration (KEY=VALUE):
{config}"""


def help_text(overrides: list[str]) -> str:
    """Return the text of --help. Hydra's own help takes three times as long, and lists schemas among the presets."""
    folders = sorted(folder for folder in CONF_DIR.iterdir() if any(folder.glob("*.yaml")))
    presets = [f"  {folder.name}: {', '.join(presets_of(folder.name))}" for folder in folders]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        config = compose("config", overrides=overrides)
    return localized(HELP).format(presets="\n".join(presets), config=OmegaConf.to_yaml(config))


def typed(config: DictConfig, overrides: Iterable[str] = ()) -> Config:
    """Convert the configuration composed from `overrides` to its typed form and check it. Raises ConfigError."""

    with refusals():
        missing = sorted(OmegaConf.missing_keys(config))  # sorted: the message must not depend on the order of a set
        if missing:
            raise ConfigError(f"{missing[0]} is not set; give it as {missing[0]}=...")
        result = OmegaConf.to_object(config)
    assert isinstance(result, Config)
    for group in SCHEMAS.keys() - schema_names(result).keys():
        raise ConfigError(f"{group} has no preset; {choices(group)}")
    refuse_unnamed(result.plugins, "a preset")  # every rank imports the plugins, so the command line must name them
    _refuse_added_keys(config, result)
    result.run.overrides = list(overrides)
    for key, value in leaves(result):
        if isinstance(value, str) and re.search("[\ud800-\udfff]", value):  # of bytes that are not UTF-8
            raise ConfigError(f"{key}={value} is not UTF-8, which config.yaml must be; rename the file or folder")
        if isinstance(value, str) and "${" in value:
            raise ConfigError(f"{key}={value} has ${{, which config.yaml would read as an interpolation; leave it out")
        if isinstance(value, str) and re.match("~[^/]*/", value) and key != "data.cache_dir":  # not all data needs it
            with known_home(key):
                Path(value).expanduser()
    check(result)
    return result


def _refuse_added_keys(node: DictConfig, schema: Any, prefix: str = "") -> None:
    """Raise ConfigError for unknown keys. Hydra accepts any key given with `+`, but nothing would read it."""

    known = {item.name for item in dataclasses.fields(schema)}
    for key in set(node) - known:
        raise ConfigError(unknown_key(f"{prefix}{key}"))
    for key in known & set(node):  # a section removed with ~ is absent here, and has its class's defaults
        if dataclasses.is_dataclass(value := getattr(schema, str(key))):
            _refuse_added_keys(node[key], value, f"{prefix}{key}.")
