"""Turn a dense model into a mixture of experts: upcycle RUN_OR_STEP RUN_DIR experts=8 [top_k=2]

Every expert starts as a copy of the dense MLP, and the router's weights are random (Komatsuzaki et al. 2022,
arXiv:2212.05055). The gate weights of each token's experts sum to 1, so the new model initially computes the same
function as the dense model. RUN_DIR becomes a run with one checkpoint, of step 0, without optimizer state. To train it:
gptlite train checkpoint.resume=RUN_DIR checkpoint.load=weights model=... model.moe.experts=... data=...
"""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gptlite.checkpoint.load import load_tensors, read_config
from gptlite.checkpoint.manifest import read_manifest
from gptlite.config.overrides import hydra_value
from gptlite.config.saved import from_yaml, override_value, to_yaml
from gptlite.errors import printable
from gptlite.files import refuse_used
from gptlite.invocation import command
from gptlite.models.capabilities import required
from gptlite.models.init import init_weight_
from gptlite.models.model import Model
from gptlite.progress import log
from gptlite.satellites.checkpoint_tool.huggingface import CHECKPOINTS, changed, write_first
from gptlite.satellites.checkpoint_tool.places import one_checkpoint


class Upcycling(Protocol):
    """Capability of a spec: experts in place of a dense MLP."""

    def upcycled(self, config: Any, experts: int, top_k: int) -> tuple[Any, dict[str, str]]:
        """Return the configuration with `experts` experts in place of the dense MLP, and `{expert parameter: dense
        parameter that each expert copies}`. Raises ConfigError for a configuration that cannot have experts."""
        ...


@dataclass
class Options:
    """Options of the subcommand."""

    experts: int = 8
    top_k: int = 2


def run(paths: list[str], options: Options) -> int:
    """Write the new checkpoint and print its folder. Raises ConfigError for a model that cannot have experts, and if
    RUN_DIR is not empty."""
    step, run_dir = one_checkpoint(paths[0]), Path(paths[1]).expanduser()
    refuse_used("RUN_DIR", run_dir, holding=CHECKPOINTS)
    config = from_yaml(read_config(step), step)
    dense = Model.of(config.model)
    maker = required(dense.spec, Upcycling, str(step))
    model_config, copies = maker.upcycled(config.model, options.experts, options.top_k)
    keys = [f"model.{key}={override_value(value)}" for key, value in changed(model_config, config.model)]
    # The new run has another folder and other weights, so these overrides of the dense run are left out.
    kept = [each for each in config.run.overrides if not each.lstrip("+~").startswith(("run.", "checkpoint."))]
    overrides = [*kept, *keys]
    where = replace(config.run, dir=str(run_dir), name=run_dir.name, overrides=overrides)
    new = replace(config, model=model_config, run=where)
    tensors = _tensors(step, Model.of(model_config), copies, config.seed)
    written = write_first(run_dir, tensors, to_yaml(new), {}, log)
    start = [f"checkpoint.resume={hydra_value(str(run_dir))}", "checkpoint.load=weights"]
    log(f"train from it with: {command('train')} {shlex.join([*start, *overrides])}")
    print(printable(written))
    return 0


def _tensors(step: Path, model: Model, copies: dict[str, str], seed: int) -> dict[str, Tensor]:
    """Return the new model's tensors by key: the dense model's, copies of its MLP for each expert, and new ones."""
    stored, shapes = read_manifest(step).tensors, model.shapes()
    sources = {name: f"model.{copies.get(name, name)}" for name in shapes}
    dense = {key: torch.empty(stored[key]["shape"]) for key in sources.values() if key in stored}
    load_tensors(step, dense, strict=False, log=log)
    tensors = {f"model.{name}": value for name, value in model.initial_buffers().items()}
    for name, shape in shapes.items():
        if (value := dense.get(sources[name])) is None:
            init_weight_(model, name, value := torch.empty(shape), seed)
        tensors[f"model.{name}"] = value.expand(shape).contiguous()  # a copy for each expert
    return tensors
