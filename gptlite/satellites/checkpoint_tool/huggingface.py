"""Conversion of checkpoints to and from Hugging Face folders, for models whose spec has an adapter."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlite.checkpoint import store
from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.find import find_checkpoint
from gptlite.checkpoint.huggingface import INDEX, PICKLE, Stored, open_weights, read_object, write_weights
from gptlite.checkpoint.load import load_tensors, read_config
from gptlite.checkpoint.manifest import read_file, read_manifest
from gptlite.config.compose import load
from gptlite.config.overrides import hydra_value
from gptlite.config.plugins import as_override, import_plugins
from gptlite.config.saved import from_yaml, leaves, override_value, to_yaml
from gptlite.config.schema import Config
from gptlite.data.config import DataConfig
from gptlite.documents import shown
from gptlite.errors import ConfigError, did_you_mean, system_error
from gptlite.files import new_folder, refuse_used, write_synced
from gptlite.invocation import command
from gptlite.models.config import ModelConfig
from gptlite.models.model import Model
from gptlite.models.registry import spec_of
from gptlite.progress import Log
from gptlite.satellites.checkpoint_tool.check_export import MOST_BYTES, can_load, check_export, transformers_version
from gptlite.satellites.checkpoint_tool.meta import PARAMS, is_meta, open_meta
from gptlite.satellites.checkpoint_tool.statistics import not_finite
from gptlite.satellites.corpus.config import TextConfig
from gptlite.satellites.huggingface.adapter import Adapter, Weight
from gptlite.satellites.huggingface.adapters import adapters_of, all_adapters
from gptlite.tokenizers.base import DEFINITION, Tokenizer, load_tokenizer
from gptlite.tokenizers.export import tokenizer_files
from gptlite.tokenizers.find import EXPORTED

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHECKPOINTS = "checkpoints"  # in a run folder
KEPT = "huggingface"  # folder in a checkpoint with files that an import stores unread and an export writes back
KEPT_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
MOST_KEPT_BYTES = 1 << 28
NO_TOKENIZER = "none"  # see checkpoint/compare.py; a run that trains from these weights sets the tokenizer
# Keys that a model may have, each with the key whose default it sets.
DEFAULTS_OF_MODELS = {"peak_lr": "optimizer.lr", "sequence_length": "data.sequence_length"}
# Metadata of a checkpoint (trainer/state.py) before the first step.
FIRST_META: dict[str, Any] = {
    "step": 0,
    "consumed_samples": 0,
    "tokens": 0,
    "best_val_loss": None,
    "evaluated_step": 0,
    "wandb_id": None,
}


def export(
    checkpoint: Path,
    target: Path,
    *,
    dtype: str = "fp32",
    max_shard_bytes: int = 5_000_000_000,
    check: bool | None = None,
    log: Log = print,
) -> None:
    """Write a checkpoint's model as the new folder `target`, for `from_pretrained` of transformers.

    `checkpoint` is a step folder, or a run folder, whose newest intact checkpoint is exported; it is verified here. One
    tensor is in memory at a time. `dtype` is fp32, bf16 or fp16; weights of more than `max_shard_bytes` bytes are split
    into several files. `check`: load the folder with transformers, and compare log probabilities (`check_export`); None
    does so if transformers is installed, for up to 2 GB. `target` appears once all files are on disk and compared.
    Raises ConfigError for a model without an adapter, a missing or damaged checkpoint, an existing target, a full disk,
    values that are not finite or overflow `dtype`, and an export that differs.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype} is not one of {', '.join(DTYPES)}{did_you_mean(dtype, DTYPES)}")
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes={max_shard_bytes} must be at least 1")
    if check and not transformers_version():
        raise ConfigError("check=true needs transformers; install it (pip install transformers), or leave out check")
    target = Path(target).expanduser()
    refuse_used("target", target)
    if store.step_folders(target.parent):
        raise ConfigError(f"target={target} is in a checkpoints folder; give a folder elsewhere")
    step = find_checkpoint(str(checkpoint), "checkpoint", log)
    model = from_yaml(read_config(step), checkpoint).model
    adapter = _adapter_for(model, step)
    with _errors_of_the_disk(f"target={target}"), new_folder(target) as folder:
        for name, content in _files(step, adapter, model, dtype, log).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_synced(folder / name, content)
        weights = [
            Stored(weight.name, weight.shape, DTYPES[dtype], partial(_weight, step, weight, log))
            for weight in adapter.weights(model)
        ]
        write_weights(folder, weights, max_shard_bytes, log)
        size = sum(weight.num_bytes for weight in weights)
        if check or (check is None and size <= MOST_BYTES and can_load(adapter.model_class)):
            ours = load_tokenizer(step / "tokenizer") if (step / "tokenizer").is_dir() else None
            check_export(folder, step, model, adapter.model_class, DTYPES[dtype], ours, log)
    log(f"exported {step} to {target}: {size / 1e6:,.1f} MB of {dtype}, for {adapter.model_class}.from_pretrained")


def _adapter_for(model: ModelConfig, step: Path) -> Adapter:
    """Return the adapter that fits a model.

    Raises ConfigError with the values that the closest adapter does not support.
    """
    adapters = adapters_of(spec := spec_of(model))
    if not adapters:
        raise ConfigError(f"{step}: the {spec.name} model has no Hugging Face adapter; add `huggingface` to its spec")
    found = [(adapter.differences(model), adapter) for adapter in adapters]
    reasons, nearest = min(found, key=lambda each: (bool(each[0]) and not each[1].related(model), len(each[0])))
    if reasons:
        raise ConfigError(
            f"{step}: no model of transformers matches this one; {nearest.title} has no {', '.join(reasons)}; "
            "to export a model, train one without these settings"
        )
    return nearest


def _files(step: Path, adapter: Adapter, model: ModelConfig, dtype: str, log: Log) -> Mapping[str, str | bytes]:
    """Return `{path: content}` of config.json, generation_config.json, and the tokenizer for gptlite and AutoTokenizer.

    If the tokenizer cannot be converted, a class that does not exist is named for AutoTokenizer, which would otherwise
    make an empty tokenizer for some models (transformers 5.24). For an imported checkpoint, the files are those that
    the import stored, with the exported dtype and class in config.json.
    """
    dtype_name, held = str(DTYPES[dtype]).removeprefix("torch."), read_manifest(step).files
    kept = {name.removeprefix(f"{KEPT}/"): read_file(step, name) for name in held if name.startswith(f"{KEPT}/")}
    if kept:
        config = json.loads(kept["config.json"])
        config["architectures"] = [adapter.model_class]
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype_name
        return kept | {"config.json": _json(config)}
    ours = {name: read_file(step, name) for name in held if name.startswith("tokenizer/")}
    tokenizer = load_tokenizer(step / "tokenizer") if ours else None
    eod = tokenizer.eod if tokenizer is not None else None
    files: dict[str, str | bytes] = {"config.json": _json(adapter.to_json(model, dtype_name, eod))}
    if eod is not None:
        files["generation_config.json"] = _json({"bos_token_id": eod, "eos_token_id": eod})
    files["tokenizer_config.json"] = _json({"tokenizer_class": "NotExported"})
    if tokenizer is not None:
        try:
            files |= tokenizer_files(tokenizer)
        except ConfigError as error:  # the weights are useful without a tokenizer
            log(f"no tokenizer for AutoTokenizer: {error}")
    return files | {f"{EXPORTED}/{name.removeprefix('tokenizer/')}": content for name, content in ours.items()}


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _weight(step: Path, weight: Weight, log: Log) -> Tensor:
    """Return a tensor of a checkpoint in Hugging Face's form. Raises ConfigError if it is not finite."""
    if weight.ours is None:
        return torch.zeros(weight.shape)
    key = f"model.{weight.ours}"
    stored = read_manifest(step).tensors.get(key, {})
    ours = torch.empty(weight.our_shape, dtype=getattr(torch, stored.get("dtype", "float32")))
    load_tensors(step, {key: ours}, strict=False, verified=True, log=log)
    if problem := not_finite(ours):
        raise ConfigError(f"{step}: {key} {problem}; export an earlier checkpoint")
    return weight.view(ours)


def import_(source: Path, run_dir: Path, *, plugins: Sequence[str] = (), log: Log = print) -> Path:
    """Create a checkpoint of step 0 in the new `run_dir` from a Hugging Face folder. Returns the step folder.

    `source` contains config.json and model.safetensors, model.safetensors.index.json with its files, or
    pytorch_model.bin; or Meta's params.json and consolidated.NN.pth. The model is the one whose adapter matches
    config.json's model_type, or reads Meta's files; modules in `plugins` may register it. Weights are stored in fp32.
    The small files beside them, including a tokenizer, are stored for `export` but not interpreted: the checkpoint has
    no tokenizer, unless gptlite exported the folder. The vocabulary is padded with rows of zeros. The model is in
    memory once (with pytorch_model.bin, twice). The last log line is the command that trains from the checkpoint.

    Raises ConfigError if the model differs from what the adapter supports, naming the key or tensor, and if `run_dir`
    is not empty. In both cases nothing is written.
    """
    source, run_dir = Path(source).expanduser(), Path(run_dir).expanduser()
    meta = is_meta(source)
    if not meta and not (source / "config.json").is_file():
        raise ConfigError(
            f"source={source} holds no config.json; give a folder that save_pretrained wrote, or one of Meta's with "
            f"{PARAMS}"
        )
    refuse_used("run_dir", run_dir, holding=CHECKPOINTS)
    import_plugins(plugins)
    tokenizer = load_tokenizer(source / EXPORTED) if (source / EXPORTED / DEFINITION).is_file() else None
    name = ("meta-" if meta else "hf-") + re.sub(r"[^\w.-]", "-", source.resolve().name)
    content, adapter, stored = open_meta(source) if meta else _opened(source)
    model = adapter.from_json(content, name)
    weights = {adapter.canonical(weight.name) or weight.name: weight for weight in adapter.weights(model)}
    _refuse_another_model(source, stored, weights, adapter)
    overrides, config = _composed(model, name, run_dir, plugins)
    beside = {f"{KEPT}/{each}": content for each, content in _other_files(source).items()}
    beside[f"{KEPT}/config.json"] = beside.get(f"{KEPT}/config.json", _json(content).encode())
    tensors: dict[str, Tensor] = {}
    for weight_name, weight in weights.items():
        ours = torch.zeros(weight.our_shape)
        if weight.ours is not None:  # several stored tensors may be rows of one of ours
            ours = tensors.setdefault(f"model.{weight.ours}", ours)
        _fill(ours, source, weight, stored[weight_name])
    tensors = {f"model.{name}": value for name, value in Model.of(model).initial_buffers().items()} | tensors
    step = write_first(run_dir, tensors, to_yaml(config), beside, log, tokenizer)
    text = ", ".join(sorted(Path(name).name for name in beside))
    log(f"imported {source} to {step}; kept for an export: {text}")
    if tokenizer is None:
        log("its tokenizer is not imported: the training data must use the same token ids")
    else:
        spec = hydra_value(str(source / EXPORTED))
        text = f"{tokenizer.kind} tokenizer of {tokenizer.vocab_size:,} ids"
        log(f"its {text} is imported: prepare data with tokenizer={spec}")
    start = [f"checkpoint.resume={hydra_value(str(run_dir))}", "checkpoint.load=weights"]
    line = f"{command('train')} {shlex.join([*start, *overrides])}"
    log(f"train from it with any data=... whose vocabulary size is at most {spec_of(model).vocab_size(model)}: {line}")
    return step


def write_first(
    run_dir: Path,
    tensors: dict[str, Tensor],
    config_yaml: str,
    beside: Mapping[str, bytes],
    log: Log,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Write the checkpoint of step 0 of a new run. Returns its folder, which appears whole. `beside`: further files.

    Raises ConfigError if the disk is full, and if another process writes the same run.
    """
    with _errors_of_the_disk(f"run_dir={run_dir}"), new_folder(run_dir / CHECKPOINTS) as folder:
        checkpointer = Checkpointer(CheckpointConfig(keep=0), run_dir)
        checkpointer.root = folder
        known = tokenizer.fingerprint if tokenizer is not None else None
        meta = FIRST_META | {"data_identity": {"tokenizer": known}}
        step = checkpointer.save(tensors, meta, config_yaml, tokenizer, log, beside)
    return run_dir / CHECKPOINTS / step.name


def _other_files(source: Path) -> dict[str, bytes]:
    """Return `{path: content}` of the files beside the weights: config.json, generation_config.json, tokenizer files.

    Raises ConfigError if they are too large.
    """
    indices = (INDEX, f"{PICKLE}.index.json")
    paths = [path for path in sorted(source.iterdir()) if path.suffix in KEPT_SUFFIXES and path.name not in indices]
    paths = [path for path in (*paths, *sorted((source / EXPORTED).glob("*"))) if path.is_file()]
    if (size := sum(path.stat().st_size for path in paths)) > MOST_KEPT_BYTES:
        largest = max(paths, key=lambda path: path.stat().st_size).name
        raise ConfigError(
            f"source={source} has {size:,} bytes of files besides the weights, and at most {MOST_KEPT_BYTES:,} are "
            f"imported; move {largest} to another folder"
        )
    return {path.relative_to(source).as_posix(): path.read_bytes() for path in paths}


def _opened(source: Path) -> tuple[dict[str, Any], Adapter, dict[str, Stored]]:
    """Return the content of config.json, its adapter, and the tensors by canonical name."""
    content = read_object(source / "config.json")
    adapter = _adapter_of(content)
    return content, adapter, open_weights(source, adapter.canonical)


def _adapter_of(content: Mapping[str, Any]) -> Adapter:
    """Return the adapter for a config.json. Raises ConfigError for a model_type without an adapter."""
    model_type = content.get("model_type")
    adapters = all_adapters()
    for adapter in adapters:
        if adapter.model_type == model_type:
            return adapter
    known = ", ".join(dict.fromkeys(shown(each.model_type) for each in adapters))  # a plugin may inherit some
    raise ConfigError(
        f"config.json: model_type={shown(model_type)}: only model_type={known} can be imported; see plugins=[MODULE]"
    )


def _refuse_another_model(
    source: Path, stored: Mapping[str, Stored], weights: Mapping[str, Weight], adapter: Adapter
) -> None:
    """Raise ConfigError if tensors are missing or unexpected, or if their shapes do not match config.json."""
    for name, weight in weights.items():
        if name not in stored:
            raise ConfigError(f"source={source}: {name} is missing from the {adapter.title} model of its config.json")
        if stored[name].shape != weight.shape:
            found, expected = list(stored[name].shape), list(weight.shape)
            raise ConfigError(f"source={source}: {name} has shape {found}, but config.json requires {expected}")
        if stored[name].dtype not in DTYPES.values():
            raise ConfigError(f"source={source}: {name} is {stored[name].dtype}; save it in float32 first")
    copies = adapter.copies()
    for name in sorted(stored.keys() - weights.keys()):
        if name not in copies:
            raise ConfigError(
                f"source={source}: {name} is not a tensor of the {adapter.title} model of its config.json"
            )
        if not torch.equal(stored[name].read(), stored[copies[name]].read()):
            raise ConfigError(
                f"source={source}: {name} differs from {copies[name]}; set tie_word_embeddings=false in its config.json"
            )


def _fill(ours: Tensor, source: Path, weight: Weight, stored: Stored) -> None:
    """Copy a stored tensor into its place in `ours`, a tensor of this model. Raises ConfigError for values that are not
    finite, and for non-zero values of a parameter that this model does not have."""
    view = weight.view(ours)
    theirs = stored.read()
    if problem := not_finite(theirs):
        raise ConfigError(f"source={source}: {stored.name} {problem}; download it again, or import another checkpoint")
    if weight.ours is None and theirs.any():
        raise ConfigError(f"source={source}: {stored.name} is not zero, but gptlite's model has no such parameter")
    view.copy_(theirs.reshape(view.shape))


def changed(model: ModelConfig, default: ModelConfig) -> list[tuple[str, Any]]:
    """Return the keys and values of `model` that differ from those of `default`."""
    values = dict(leaves(default))
    return [(key, value) for key, value in leaves(model) if values[key] != value]


def _composed(model: ModelConfig, name: str, run_dir: Path, plugins: Sequence[str]) -> tuple[list[str], Config]:
    """Return the command-line overrides that select this model, and the checkpoint's configuration."""
    default, overrides = load().model, [as_override(plugins)] if plugins else []
    if type(default) is type(model):
        overrides.append("optimizer=adamw")  # the published models' optimizer, not that of the default preset
    else:
        overrides.append(f"model={spec_of(model).name}_schema")
        default = type(model)()
    names = [field.name for field in dataclasses.fields(model)]
    overrides += [f"model.{key}={override_value(value)}" for key, value in changed(model, default)]
    # train.py requires these keys if the model sets no default. This checkpoint is not trained, so any value will do.
    unknown = [f"{key}=1" for mine, key in DEFAULTS_OF_MODELS.items() if mine not in names]
    config = load([*overrides, *unknown, f"run.name={hydra_value(name)}", f"run.dir={hydra_value(str(run_dir))}"])
    assert config.model == model
    batches = {field.name: getattr(config.data, field.name) for field in dataclasses.fields(DataConfig)}
    if (vocab_size := spec_of(model).vocab_size(model)) is None:
        raise ConfigError(
            f"the {spec_of(model).name} model has no known vocabulary size; define `vocab_size` in its spec"
        )
    data = TextConfig(**batches, path=NO_TOKENIZER, tokenizer=NO_TOKENIZER, vocab_size=vocab_size)
    return overrides, dataclasses.replace(config, data=data)


@contextmanager
def _errors_of_the_disk(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{where}: {system_error(error, 'give another folder')}") from None
