"""The root configuration: one dataclass a section, each beside its owner. Only this file knows Hydra and YAML.

No torch here: `gptlite train --cfg job` composes and prints in a quarter of a second.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gptlite.checkpoint.config import CheckpointConfig
from gptlite.data.config import CorpusConfig, DataConfig, SyntheticConfig, TextConfig, TokensConfig
from gptlite.errors import ConfigError, did_you_mean
from gptlite.invocation import localized
from gptlite.metrics.config import LoggerConfig, TensorboardConfig, WandbConfig
from gptlite.models import registry
from gptlite.models.config import ModelConfig
from gptlite.models.spec import spec_of
from gptlite.ops.config import OpsConfig
from gptlite.optimizer import config as optimizers
from gptlite.optimizer import registry as optimizer_registry
from gptlite.optimizer.config import OptimizerConfig, ScheduleConfig
from gptlite.parallelism.config import ParallelismConfig
from gptlite.plan.config import ClusterConfig
from gptlite.plugins import import_plugins, named_in
from gptlite.precision import PrecisionConfig
from gptlite.trainer.config import TrainerConfig

T = TypeVar("T")
# A package of its own, so that an installed gptlite finds its presets too.
CONF_DIR = Path(import_module("gptlite.conf").__path__[0]).resolve()
PREPARED = "data"  # where `data=NAME` looks for NAME, a folder of tokens, if there is no such preset


# Of the class that a spec of gptlite.models names, whose fields the code that reads them knows.
if TYPE_CHECKING:
    from typing import Any as AnyModel
else:
    AnyModel = ModelConfig


@dataclass
class RunConfig:
    """Where a run lives. Its folder is never overwritten: the same folder again means go on.

    `overrides` is the command line the run was composed with; going on starts from it.
    """

    name: str = "???"
    dir: str = "???"
    overrides: list[str] = field(default_factory=list)


@dataclass
class Config:
    """Everything a run is made from."""

    seed: int = 1234
    plugins: list[str] = field(default_factory=list)  # modules that register models of one's own
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


# group -> the schemas its presets may start from
SCHEMAS: dict[str, dict[str, type]] = {
    "model": registry.SCHEMAS,  # plugins add theirs
    "parallelism": {"parallelism_schema": ParallelismConfig},
    "precision": {"precision_schema": PrecisionConfig},
    "ops": {"ops_schema": OpsConfig},
    "data": {
        "text_schema": TextConfig,
        "corpus_schema": CorpusConfig,
        "tokens_schema": TokensConfig,
        "synthetic_schema": SyntheticConfig,
    },
    "optimizer": optimizer_registry.SCHEMAS,
    "schedule": {
        "constant_schema": optimizers.ConstantConfig,
        "cosine_schema": optimizers.CosineConfig,
        "linear_schema": optimizers.LinearConfig,
        "wsd_schema": optimizers.WSDConfig,
        "inverse_sqrt_schema": optimizers.InverseSqrtConfig,
        "warmup_schema": optimizers.WarmupConfig,
    },
    "trainer": {"trainer_schema": TrainerConfig},
    "checkpoint": {"checkpoint_schema": CheckpointConfig},
    "logger": {"jsonl_schema": LoggerConfig, "tensorboard_schema": TensorboardConfig, "wandb_schema": WandbConfig},
    "cluster": {"cluster_schema": ClusterConfig},
}


def register() -> None:
    """Puts the schemas where Hydra finds them. Safe to call again."""
    store = ConfigStore.instance()
    store.store(name="config_schema", node=Config)
    for group, schemas in SCHEMAS.items():
        for name, node in schemas.items():
            store.store(group=group, name=name, node=node)
    for name in prepared_folders():
        node = {"defaults": ["tokens_schema", "_self_"], "path": f"{PREPARED}/{name}"}
        store.store(group="data", name=name, node=node | {"sequence_length": "${model.sequence_length}"})


def prepared_folders() -> list[str]:
    """Names of the folders ./data/NAME that hold tokens: each is a preset data=NAME, unless that is one already."""
    names = sorted(index.parent.name for index in Path(PREPARED).glob("*/train.idx"))
    return [name for name in names if not (CONF_DIR / "data" / f"{name}.yaml").exists()]


def load(overrides: Iterable[str] = (), config_dir: Path = CONF_DIR) -> Config:
    """The configuration that `train.py` would run with these overrides. Raises ConfigError."""
    from gptlite.config_errors import refusals
    from gptlite.warm_start import with_model

    overrides = list(overrides)
    import_plugins(named_in(overrides))
    register()
    with refusals(), initialize_config_dir(str(config_dir), version_base="1.3"):
        return typed(compose("config", overrides=with_model(overrides)))


HELP = """\
gptlite: GPT pretraining, composed by Hydra.

gptlite train                               train the default: GPT-lite on Shakespeare
gptlite train GROUP=PRESET KEY=VALUE ...    change anything
gptlite train run.dir=outputs/...           go on with a run
gptlite train --cfg job                     print the configuration and stop
gptlite train --hydra-help                  Hydra's own options

Groups and their presets (GROUP=PRESET):
{presets}

The configuration (KEY=VALUE):
{config}"""


def help_text(overrides: list[str]) -> str:
    """What --help prints. Hydra's own takes three times as long over its list of groups, and shows the schemas too."""
    folders = sorted(folder for folder in CONF_DIR.iterdir() if any(folder.glob("*.yaml")))
    presets = [f"  {folder.name}: {', '.join(presets_of(folder.name))}" for folder in folders]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        config = compose("config", overrides=overrides)
    return localized(HELP).format(presets="\n".join(presets), config=OmegaConf.to_yaml(config))


def typed(config: DictConfig) -> Config:
    """The typed form of a composed configuration, checked across sections. Raises ConfigError."""
    from gptlite.checks import check
    from gptlite.config_errors import refusals

    with refusals():
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ConfigError(f"{missing[0]} is not set; give it as {missing[0]}=...")
        result = OmegaConf.to_object(config)
    assert isinstance(result, Config)
    for group in SCHEMAS.keys() - schema_names(result).keys():
        raise ConfigError(f"{group} has no preset; {choices(group)}")
    _refuse_added_keys(config, result)
    check(result)
    return result


def with_vocabulary(config: Config, vocab_size: int) -> Config:
    """The configuration with `model.vocab_size` known. Raises ConfigError if the model's is below the tokenizer's."""
    spec = spec_of(config.model)
    config = dataclasses.replace(config, model=spec.with_vocabulary(config.model, vocab_size))
    size = spec.vocab_size(config.model)
    if size is not None and size < vocab_size:
        raise ConfigError(
            f"model.vocab_size={size} is below the tokenizer's {vocab_size}; "
            f"set model.vocab_size={vocab_size}, or null to follow the tokenizer"
        )
    return config


def _refuse_added_keys(node: DictConfig, schema: Any, prefix: str = "") -> None:
    """A key given with `+` passes Hydra whatever it is, and nothing would read it."""
    from gptlite.config_errors import unknown_key

    known = {item.name for item in dataclasses.fields(schema)}
    for key in set(node) - known:
        raise ConfigError(unknown_key(f"{prefix}{key}"))
    for key in known & set(node):  # a section that is not there was taken out with ~: it has its class's defaults
        if dataclasses.is_dataclass(value := getattr(schema, str(key))):
            _refuse_added_keys(node[key], value, f"{prefix}{key}.")


def choices(group: str) -> str:
    """`choose optimizer=adam, adamw, sgd`."""
    return f"choose {group}={', '.join(presets_of(group))}"


def presets_of(group: str) -> list[str]:
    """What GROUP=... can be; of data also the prepared folders."""
    names = sorted(file.stem for file in (CONF_DIR / group).glob("*.yaml"))
    others = {"data": prepared_folders, "model": lambda: registry.PRESETS, "optimizer": lambda: optimizers.OPTIMIZERS}
    return names + [name for name in others.get(group, list)() if name not in names]


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dicts, enums by name: what goes into YAML, manifests and trackers."""
    # Not resolved again: nothing is left to resolve but what a remembered override says, and that stays as typed.
    container = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True, resolve=False)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()} | {"schemas": schema_names(config)}


def to_yaml(config: Config) -> str:
    """The resolved configuration; `from_yaml` reads it back to an equal object."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)), sort_keys=False)


def from_yaml(text: str) -> Config:
    """The configuration `to_yaml` wrote. Raises ConfigError for one that is damaged or of another version."""
    try:
        raw = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        assert isinstance(raw, dict)
        names, overrides = raw.pop("schemas"), raw["run"].pop("overrides")
        import_plugins(raw.get("plugins", []))
        base = OmegaConf.structured(Config)
        for group, name in names.items():
            base[group] = SCHEMAS[group][name]
        result = OmegaConf.to_object(OmegaConf.merge(base, raw))
    except (OmegaConfBaseException, YAMLError, KeyError, TypeError, AssertionError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(f"a saved config.yaml is damaged or of another version of gptlite: {reason}") from error
    assert isinstance(result, Config)
    result.run.overrides = overrides
    return result


def read_saved(path: Path) -> Config:
    """The configuration in a run's config.yaml. Raises ConfigError naming the file where it cannot be read."""
    try:
        return from_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}; move it away, or give another run.dir") from error


def schema_names(config: Config) -> dict[str, str]:
    """Which schema each section has: its class, by the name presets use."""
    sections = {group: type(getattr(config, group)) for group in SCHEMAS}
    return {group: name for group, cls in sections.items() for name, c in SCHEMAS[group].items() if c is cls}


def saved_overrides(arguments: list[str]) -> list[str]:
    """What a run in an existing `run.dir` was composed with, but for the keys that `arguments` give anew.

    So `gptlite train run.dir=outputs/mine` goes on with that run, whatever it was.
    """
    given = {argument.partition("=")[0].lstrip("+~"): argument.partition("=")[2] for argument in arguments}
    saved = Path(given.get("run.dir", "").strip("'\"")).expanduser() / "config.yaml"
    if not given.get("run.dir") or not saved.exists():
        return []
    run = read_saved(saved).run
    candidates = [*run.overrides, f"run.name={hydra_value(run.name)}"]
    kept = {c.partition("=")[0].lstrip("+~"): c for c in candidates}
    # A preset given anew takes its group's remembered keys with it: another preset may not have them.
    kept = {key: c for key, c in kept.items() if key not in given and key.partition(".")[0] not in given}
    if any((saved.parent / "checkpoints").glob("step-*")):
        # Where the run came from is behind it: it goes on from its own checkpoints.
        kept = {key: c for key, c in kept.items() if key not in ("checkpoint.resume", "checkpoint.load")}
    return list(kept.values())


def hydra_value(text: str) -> str:
    """A string as the value of an override, in quotes where Hydra would read signs in it."""
    if re.fullmatch(r"[\w./:+~@-]+", text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def override_value(value: Any) -> str:
    """A value of any type as the value of an override."""
    if isinstance(value, Enum):
        return value.name
    return hydra_value(value) if isinstance(value, str) else json.dumps(value)


def known_keys() -> list[str]:
    """Every key any preset can have, dotted."""
    return sorted(set(_keys(Config, "")))


def _keys(cls: type, prefix: str) -> Iterator[str]:
    for item in dataclasses.fields(cls):
        yield prefix + item.name
        if prefix == "" and item.name in SCHEMAS:
            for schema in SCHEMAS[item.name].values():
                yield from _keys(schema, f"{item.name}.")
        elif item.name == "run":
            yield from _keys(RunConfig, "run.")
        elif isinstance(item.type, type) and dataclasses.is_dataclass(item.type):
            yield from _keys(item.type, f"{prefix}{item.name}.")


def parse_arguments(schema: type[T], arguments: list[str]) -> T:
    """The `key=value` command line of a tool, typed by a dataclass. Raises ConfigError."""
    config = OmegaConf.structured(schema)
    fields = {item.name: item for item in dataclasses.fields(schema)}  # type: ignore[arg-type]
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator:
            raise ConfigError(f"{argument!r} is not key=value; the keys are {', '.join(fields)}")
        if key not in fields:
            raise ConfigError(f"{key} is not a key of this tool{did_you_mean(key, fields)}; it has {', '.join(fields)}")
        text = fields[key].type in (str, str | None, "str", "str | None")
        try:
            config[key] = value if text else OmegaConf.from_dotlist([argument])[key]
        except Exception as error:
            raise ConfigError(f"{argument}: {str(error).splitlines()[0]}") from error
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ConfigError(f"{missing[0]} is not set; give it as {missing[0]}=...")
    return OmegaConf.to_object(config)  # type: ignore[return-value]
