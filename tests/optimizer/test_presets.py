"""The YAML presets: each composes to its class, shows every setting, and passes the checks."""

from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from gptlite.ops import apex
from gptlite.optimizer import config as classes
from gptlite.optimizer import schedule_config as schedules
from gptlite.optimizer.checks import check_optimizer
from gptlite.satellites.onebit import configs as onebit
from gptlite.satellites.optimizers import configs

CONF = Path(__file__).parents[2] / "conf"
# Without those that other tests register.
OWN = (classes.__name__, configs.__name__, onebit.__name__)
OPTIMIZERS = {name: kind for name, kind in classes.OPTIMIZERS.items() if kind.__module__ in OWN}
# The others take the model's published rate, which is AdamW's.
RATES = {"lamb": 6e-3, "onebit_lamb": 6e-3, "apex_lamb": 6e-3, "lion": 1e-4, "adafactor": 1e-2}
SCHEDULES = {
    "constant": schedules.ConstantConfig,
    "cosine": schedules.CosineConfig,
    "inverse_sqrt": schedules.InverseSqrtConfig,
    "linear": schedules.LinearConfig,
    "warmup": schedules.WarmupConfig,
    "wsd": schedules.WSDConfig,
}
PRESETS = [("optimizer", *item) for item in OPTIMIZERS.items()] + [("schedule", *item) for item in SCHEDULES.items()]


@dataclass
class Model:
    """Only what the presets take from a model."""

    peak_lr: float = 2.5e-4


@pytest.fixture(autouse=True)
def schemas():
    store = ConfigStore.instance()
    store.store(group="model", name="peak_lr_only", node=Model)
    for group, name, cls in PRESETS:
        store.store(group=group, name=f"{name}_schema", node=cls)


def composed(*overrides: str) -> Any:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_object(compose(overrides=["+model=peak_lr_only", *overrides]))


@pytest.mark.parametrize(("group", "name", "cls"), PRESETS)
def test_a_preset_is_typed_and_shows_every_setting(group, name, cls):
    assert type(composed(f"+{group}={name}")[group]) is cls
    written = set(OmegaConf.load(CONF / group / f"{name}.yaml")) - {"defaults"}
    assert written == {field.name for field in fields(cls)}


def test_any_two_presets_train(monkeypatch):
    monkeypatch.setattr(apex, "why_not", lambda _: "")
    optimizers, schedules = (
        {name: composed(f"+{group}={name}")[group] for name in names}
        for group, names in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES))
    )
    assert {name: config.lr for name, config in optimizers.items()} == {
        name: RATES.get(name, 2.5e-4) for name in optimizers
    }
    for optimizer, schedule, max_steps in product(optimizers.values(), schedules.values(), (5, 1000)):
        check_optimizer(optimizer, schedule, max_steps)


def test_every_preset_is_tested():
    for group, presets in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
        assert {path.stem for path in (CONF / group).glob("*.yaml")} == set(presets)
