"""The YAML presets: each composes to its class, shows every setting, and passes the checks."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from gptlite import apex
from gptlite.optimizer.checks import check_optimizer
from gptlite.optimizer.config import (
    AdafactorConfig,
    AdamConfig,
    AdamW8bitConfig,
    AdamWConfig,
    ApexAdamConfig,
    ApexLambConfig,
    ConstantConfig,
    CosineConfig,
    InverseSqrtConfig,
    LambConfig,
    LinearConfig,
    LionConfig,
    MuonConfig,
    SGDConfig,
    WarmupConfig,
    WSDConfig,
)

CONF = Path(__file__).parents[2] / "conf"
OPTIMIZERS = {
    "adamw": AdamWConfig,
    "adamw_8bit": AdamW8bitConfig,
    "adam": AdamConfig,
    "sgd": SGDConfig,
    "lamb": LambConfig,
    "apex_adam": ApexAdamConfig,
    "apex_lamb": ApexLambConfig,
    "lion": LionConfig,
    "muon": MuonConfig,
    "adafactor": AdafactorConfig,
}
# The others take the model's published rate, which is AdamW's.
RATES = {"lamb": 6e-3, "apex_lamb": 6e-3, "lion": 1e-4, "adafactor": 1e-2}
SCHEDULES = {
    "constant": ConstantConfig,
    "cosine": CosineConfig,
    "inverse_sqrt": InverseSqrtConfig,
    "linear": LinearConfig,
    "warmup": WarmupConfig,
    "wsd": WSDConfig,
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("max_steps", [5, 1000])
def test_any_two_presets_train(optimizer, schedule, max_steps, monkeypatch):
    monkeypatch.setattr(apex, "why_not", lambda _: "")
    config = composed(f"+optimizer={optimizer}", f"+schedule={schedule}")
    assert config["optimizer"].lr == RATES.get(optimizer, 2.5e-4)
    check_optimizer(config["optimizer"], config["schedule"], max_steps)


def test_every_preset_is_tested():
    for group, presets in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
        assert {path.stem for path in (CONF / group).glob("*.yaml")} == set(presets)
