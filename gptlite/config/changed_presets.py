"""Presets that have changed since a run was saved: a resumed run keeps the values that it began with."""

from __future__ import annotations

from collections.abc import Callable

from omegaconf import DictConfig, OmegaConf

from gptlite.checkpoint.compare import flatten
from gptlite.config.keys import presets_of
from gptlite.config.overrides import key_of
from gptlite.config.resume import LENGTHS
from gptlite.config.saved import override_value, to_dict
from gptlite.config.schema import Config, schema_names

SECTIONS = ("model", "data", "optimizer", "schedule")  # these and the run's length determine its results


def changed_presets(saved: Config, overrides: list[str], compose: Callable[[list[str]], DictConfig]) -> list[str]:
    """Return overrides that restore a saved run's values where the current presets have different ones.

    `overrides` are those of the saved run, followed by those of the resuming command. Keys that they set are left
    alone, and so are keys that are null in a preset because the run computes their values. Of a preset that both the
    saved run and `overrides` choose, only nulls are restored: a key that is newer than the run is null in it.
    """
    overridden = set(map(key_of, overrides))
    repeated = {key_of(each) for each in overrides if each in saved.run.overrides}
    then, schemas, now = to_dict(saved), schema_names(saved), compose(overrides)
    chosen = []
    for group in SECTIONS:
        preset, same = (
            schemas[group].removesuffix("_schema"),
            type(getattr(saved, group)) is OmegaConf.get_type(now[group]),
        )
        if group == "model":  # model presets share a schema, and model.name is the name of the preset
            preset = str(then[group].get("name"))
            same = same and now[group].get("name") == preset
        if not same and group not in overridden and preset in presets_of(group):
            chosen.append(f"{group}={preset}")
    values = OmegaConf.to_container(compose([*chosen, *overrides]) if chosen else now, resolve=True, enum_to_str=True)
    assert isinstance(values, dict)
    trainer = ["eval_interval", *(["max_steps"] if overridden.isdisjoint(LENGTHS) else [])]
    kept = {section: flatten(then[section]) for section in SECTIONS if section in repeated or section not in overridden}
    for section in repeated & kept.keys():
        kept[section] = {key: was for key, was in kept[section].items() if was is None}
    kept["trainer"] = {key: then["trainer"][key] for key in trainer}
    return chosen + [
        f"{section}.{key}={override_value(was)}"
        for section, settings in kept.items()
        for key, was in settings.items()
        if f"{section}.{key}" not in overridden and flatten(values[section]).get(key) not in (None, was)
    ]
