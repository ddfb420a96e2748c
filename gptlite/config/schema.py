"""Root configuration: one dataclass per section, defined in the package that uses it, and the presets for Hydra.

This package does not import torch, so that `gptlite train --cfg job` and `--help` respond quickly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import OmegaConf

import gptlite
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.config.cluster import ClusterConfig
from gptlite.config.plugins import import_included
from gptlite.config.trainer import TrainerConfig
from gptlite.data import registry as data_registry
from gptlite.data.config import DataConfig
from gptlite.errors import ConfigError
from gptlite.metrics.config import LoggerConfig, TensorboardConfig, WandbConfig
from gptlite.models import registry
from gptlite.models.config import ModelConfig
from gptlite.ops.config import OpsConfig
from gptlite.optimizer import registry as optimizer_registry
from gptlite.optimizer import schedule_config as schedules
from gptlite.optimizer.config import OptimizerConfig
from gptlite.optimizer.schedule_config import ScheduleConfig
from gptlite.parallelism.config import ParallelismConfig
from gptlite.precision import PrecisionConfig

RENAMED = {"ops": {"bias_gelu": "activation"}}  # {section: {former key: new key}}; for models see BaseSpec
PREPARED = "data"  # folder in which `data=NAME` looks for tokens if there is no preset NAME


def _presets() -> Path:
    """Return the folder conf/: beside this package in a checkout, inside it in an installed wheel."""
    package = Path(gptlite.__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


CONF_DIR = _presets()


# At run time, Config.model is an instance of the `schema` of the model's spec. Static types cannot express that; type
# checkers see Any.
if TYPE_CHECKING:
    from typing import Any as AnyModel
else:
    AnyModel = ModelConfig


@dataclass
class RunConfig:
    """Name and folder of a run. The folder of an existing run is not overwritten: `run.dir=FOLDER` resumes that run.

    `overrides` are the overrides that the run was composed from. A resumed run starts from them.
    """

    name: str = "???"
    dir: str = "???"
    overrides: list[str] = field(default_factory=list)


@dataclass
class Config:
    """Complete configuration of a run."""

    seed: int = 1234
    plugins: list[str] = field(default_factory=list)  # user modules that register models, datasets and optimizers
    run: RunConfig = field(default_factory=RunConfig)
    model: AnyModel = field(default_factory=ModelConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    ops: OpsConfig = field(default_factory=OpsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


def require_config(config: object) -> None:
    """Raise ConfigError if `config` is not a Config."""
    if not isinstance(config, Config):
        raise ConfigError(f"{config!r} is not a Config; compose one with gptlite.load([KEY=VALUE, ...])")


# {group: {name: schema}}: the schemas that presets of a group can extend
SCHEMAS: dict[str, dict[str, type]] = {
    "model": registry.SCHEMAS,  # plugins add theirs
    "parallelism": {"parallelism_schema": ParallelismConfig},
    "precision": {"precision_schema": PrecisionConfig},
    "ops": {"ops_schema": OpsConfig},
    "data": data_registry.SCHEMAS,
    "optimizer": optimizer_registry.SCHEMAS,
    "schedule": {
        "constant_schema": schedules.ConstantConfig,
        "cosine_schema": schedules.CosineConfig,
        "linear_schema": schedules.LinearConfig,
        "wsd_schema": schedules.WSDConfig,
        "inverse_sqrt_schema": schedules.InverseSqrtConfig,
        "warmup_schema": schedules.WarmupConfig,
    },
    "trainer": {"trainer_schema": TrainerConfig},
    "checkpoint": {"checkpoint_schema": CheckpointConfig},
    "logger": {"jsonl_schema": LoggerConfig, "tensorboard_schema": TensorboardConfig, "wandb_schema": WandbConfig},
    "cluster": {"cluster_schema": ClusterConfig},
}


def register() -> None:
    """Register the schemas with Hydra, prepared folders as presets of `data`, and the resolver of conf/config.yaml. Can
    be called repeatedly."""
    import_included()  # their schemas too
    OmegaConf.register_new_resolver("gptlite.model_name", lambda *, _root_: model_name(_root_.model), replace=True)
    store = ConfigStore.instance()
    _offer(store.repo, "config_schema", Config)
    for group, schemas in SCHEMAS.items():
        for name, schema in schemas.items():
            _offer(store.repo.setdefault(group, {}), name, schema)
    for name in prepared_folders():
        node = {"defaults": ["tokens_schema", "_self_"], "path": f"{PREPARED}/{name}"}
        node["sequence_length"] = "${model.sequence_length}"
        store.store(group="data", name=name, node=node)


def model_name(model: Any) -> str:
    """Return the name of a model's section: its key `name`, or the name under which the model is registered."""
    schema = OmegaConf.get_type(model) if OmegaConf.is_config(model) else type(model)
    registered = next((spec.name for spec in registry.SPECS if spec.schema is schema), "model")
    return getattr(model, "name", None) or registered


class _Schema(ConfigNode):
    """Entry of Hydra's store that is converted at its first use: a composition uses a dozen of about fifty."""

    def __init__(self, name: str, schema: type) -> None:
        self.name, self.schema = name, schema
        self.group = self.package = self.provider = None

    @cached_property
    def node(self) -> Any:  # type: ignore[override]
        """The schema as Hydra's store keeps it."""
        return OmegaConf.structured(self.schema)


def _offer(group: dict[str, Any], name: str, schema: type) -> None:
    """Add a schema to a group of Hydra's store, unless it is there."""
    if getattr(group.get(f"{name}.yaml"), "schema", None) is not schema:
        group[f"{name}.yaml"] = _Schema(f"{name}.yaml", schema)


def prepared_folders() -> list[str]:
    """Return the names of the folders ./data/NAME with prepared tokens, which act as presets data=NAME. Names of
    presets in conf/data are left out."""
    names = sorted(index.parent.name for index in Path(PREPARED).glob("*/train.idx"))
    return [name for name in names if not (CONF_DIR / "data" / f"{name}.yaml").exists()]


def schema_names(config: Config) -> dict[str, str]:
    """Return {section: name of its schema}, with the names that presets use."""
    sections = {group: type(getattr(config, group)) for group in SCHEMAS}
    return {group: name for group, cls in sections.items() for name, c in SCHEMAS[group].items() if c is cls}
