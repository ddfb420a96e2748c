"""Turn a dense model into a mixture of experts: upcycle RUN_OR_STEP RUN_DIR experts=8 [top_k=2]

Every expert starts as a copy of the dense MLP, and the router at random (Komatsuzaki et al. 2022, arXiv:2212.05055).
The weights of a token's experts sum to 1, so the new model computes what the dense one does. RUN_DIR becomes a run with
one checkpoint of step 0, without optimizer state. To train it:
gptlite train checkpoint.resume=RUN_DIR checkpoint.load=weights model=... model.moe.experts=... data=...
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.load import load_tensors, read_config
from gptlite.checkpoint.manifest import read_manifest
from gptlite.checkpoint_tool.huggingface import FIRST_META, changed
from gptlite.checkpoint_tool.places import one_checkpoint
from gptlite.config import from_yaml, hydra_value, override_value, to_yaml
from gptlite.errors import ConfigError
from gptlite.invocation import command
from gptlite.models.init import init_weight_
from gptlite.models.model import Model
from gptlite.progress import log


@dataclass
class Options:
    """Options of the subcommand."""

    experts: int = 8
    top_k: int = 2


def run(paths: list[str], options: Options) -> int:
    """Write the new checkpoint and print its folder. Raises ConfigError for a model that cannot have experts, and if
    RUN_DIR is not empty."""
    step, run_dir = one_checkpoint(paths[0]), Path(paths[1]).expanduser()
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise ConfigError(f"RUN_DIR={run_dir} exists; nothing is overwritten, give a new folder")
    config = from_yaml(read_config(step), step)
    dense = Model.of(config.model)
    found, copies = dense.spec.upcycled(config.model, options.experts, options.top_k)
    keys = [f"model.{key}={override_value(value)}" for key, value in changed(found, config.model)]
    overrides = [*config.run.overrides, *keys]
    where = replace(config.run, dir=str(run_dir), name=run_dir.name, overrides=overrides)
    new = replace(config, model=found, run=where)
    tensors = dict(_tensors(step, Model.of(found), copies, options.experts, config.seed))
    written = Checkpointer(CheckpointConfig(keep=0), run_dir).save(tensors, FIRST_META, to_yaml(new), None, log)
    start = [f"checkpoint.resume={hydra_value(str(run_dir))}", "checkpoint.load=weights"]
    log(f"train from it with: {command('train')} {shlex.join([*start, *overrides])}")
    print(written)
    return 0


def _tensors(step: Path, model: Model, copies: dict[str, str], experts: int, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the new model by key: those of the dense one, copies for each expert, and new ones."""
    stored = read_manifest(step).tensors
    for name, shape in model.shapes().items():
        key, value = f"model.{copies.get(name, name)}", torch.empty(shape)
        if key not in stored:
            init_weight_(model, name, value, seed)
        elif name in copies:
            one = torch.empty(shape[1:])
            load_tensors(step, {key: one}, strict=False, log=log)
            value.copy_(one.expand(experts, *one.shape))
        else:
            load_tensors(step, {key: value}, strict=False, log=log)
        yield f"model.{name}", value
    for name, buffer in model.initial_buffers().items():
        yield f"model.{name}", buffer
