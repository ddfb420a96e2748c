"""Trained models for evaluation and generation, restored from a checkpoint without optimizer state."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gptlite.checkpoint.find import find_checkpoint
from gptlite.checkpoint.load import load_tensors, read_config
from gptlite.config.plugins import import_plugins
from gptlite.config.saved import from_yaml
from gptlite.config.schema import Config
from gptlite.errors import ConfigError, did_you_mean
from gptlite.models.model import Model
from gptlite.models.parallelize import materialize
from gptlite.models.registry import spec_of
from gptlite.ops.config import OpsConfig
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import build_mesh
from gptlite.parallelism.rank_sync import from_main
from gptlite.parallelism.stage_runner import StageRunner
from gptlite.parallelism.zero import storage_device
from gptlite.precision import Precision, PrecisionConfig, resolve_precision
from gptlite.tokenizers.base import Tokenizer, load_tokenizer
from gptlite.tokenizers.find import find_tokenizer
from gptlite.trainer.parts import agreed_ops, build_parts
from gptlite.trainer.state import model_tensors


class Restored(NamedTuple):
    """Trained model with the runner of its parts on this rank (in evaluation mode), its tokenizer, the configuration of
    its run, and the step folder from which it was loaded."""

    model: Model
    runner: StageRunner
    tokenizer: Tokenizer
    config: Config
    path: Path


def restore(
    checkpoint: str,
    precision: str = "auto",
    plugins: Sequence[str] = (),
    layout: ParallelismConfig | None = None,
    tokenizer: str | None = None,
) -> Restored:
    """Return a trained model, on one device or divided among the ranks of a `layout`. Collective.

    `checkpoint` is a step folder, or a run folder, whose newest intact checkpoint is used. `plugins` are imported
    first; they must include those of the checkpoint. `tokenizer` is the value of tokenizer=, for a checkpoint without
    a tokenizer. Raises ConfigError if plugins are missing, if the checkpoint does not exist or has no tokenizer, and
    for an unknown `precision`.
    """
    layout = layout or ParallelismConfig()
    import_plugins(plugins)
    mesh = build_mesh(layout)
    path = from_main(mesh, lambda: find_checkpoint(checkpoint, "checkpoint"))
    config = from_yaml(read_config(path), checkpoint)
    if (spec := spec_of(config.model)).reads == "samples":
        raise ConfigError(
            f"checkpoint={checkpoint}: the {spec.name} model reads samples, but this command needs a model of tokens"
        )
    loaded_tokenizer = _tokenizer(path, checkpoint, tokenizer, config)
    if precision not in Precision.__members__:
        hint = did_you_mean(precision, Precision.__members__)
        raise ConfigError(f"precision={precision} is not one of {', '.join(Precision.__members__)}{hint}")
    policy = resolve_precision(PrecisionConfig(Precision[precision]), mesh.device)
    model, ops = Model.of(config.model, policy), agreed_ops(OpsConfig(), mesh)
    parts = build_parts(model, layout, mesh, policy, ops, config.seed)
    materialize(model, parts, storage_device(mesh, layout))
    for part in parts:
        model.fill_buffers(part, ops, config.seed)
    load_tensors(path, model_tensors(model, parts), strict=False, verified=True, mesh=mesh)
    return Restored(model, StageRunner([part.eval() for part in parts], mesh, layout), loaded_tokenizer, config, path)


def _tokenizer(path: Path, checkpoint: str, spec: str | None, config: Config) -> Tokenizer:
    """Return the tokenizer of a step folder, or the one of `spec` for an imported model. Raises ConfigError."""
    if (path / "tokenizer").is_dir():
        if spec is not None:
            raise ConfigError(
                f"tokenizer={spec}: the checkpoint has the tokenizer that it was trained with; leave out tokenizer"
            )
        return load_tokenizer(path / "tokenizer")
    if spec is None:
        raise ConfigError(
            f"checkpoint={checkpoint} holds imported weights without a tokenizer; give their tokenizer=PATH, or train "
            f"on your data (checkpoint.resume={checkpoint} checkpoint.load=weights), and give the resulting run"
        )
    tokenizer = find_tokenizer(spec)
    rows = spec_of(config.model).vocab_size(config.model)
    if rows is not None and tokenizer.vocab_size > rows:
        raise ConfigError(
            f"tokenizer={spec} has a vocabulary size of {tokenizer.vocab_size}, above the model's {rows}; "
            f"give the tokenizer of the model"
        )
    tokenizer.begin = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
    return tokenizer
