"""Trained models for evaluation and generation, restored from a checkpoint without optimizer state."""

from collections.abc import Sequence

from gptlite.checkpoint.find import find_checkpoint
from gptlite.checkpoint.load import load_tensors, read_config
from gptlite.config import Config, from_yaml
from gptlite.config.plugins import import_plugins
from gptlite.data.tokenizer import Tokenizer, load_tokenizer
from gptlite.errors import ConfigError, did_you_mean
from gptlite.models.model import Model
from gptlite.models.parallelize import materialize, set_dtypes
from gptlite.models.spec import spec_of
from gptlite.ops.config import OpsConfig
from gptlite.ops.select import select_ops
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import build_mesh
from gptlite.parallelism.stage_runner import StageRunner
from gptlite.precision import Precision, PrecisionConfig, resolve_precision
from gptlite.trainer.state import model_tensors


def restore(
    checkpoint: str, precision: str = "auto", plugins: Sequence[str] = ()
) -> tuple[Model, StageRunner, Tokenizer, Config]:
    """Return the model, its single stage in evaluation mode on a device, its tokenizer and its run's configuration.

    `checkpoint` is a step folder, or a run folder for its newest one. `plugins` are imported first; they must include
    the checkpoint's. Raises ConfigError if they do not, if the checkpoint does not exist or has no tokenizer, and for
    an unknown `precision`.
    """
    path = find_checkpoint(checkpoint, "checkpoint")
    import_plugins(plugins)
    config = from_yaml(read_config(path), checkpoint)
    if (spec := spec_of(config.model)).reads == "samples":
        raise ConfigError(f"checkpoint={checkpoint}: the {spec.name} model reads samples; this needs a model of tokens")
    if not (path / "tokenizer").is_dir():
        raise ConfigError(
            f"checkpoint={checkpoint} holds imported weights without a tokenizer; train from it on your data "
            f"(checkpoint.resume={checkpoint} checkpoint.load=weights), and give the resulting run"
        )
    if precision not in Precision.__members__:
        hint = did_you_mean(precision, Precision.__members__)
        raise ConfigError(f"precision={precision} is not one of {', '.join(Precision.__members__)}{hint}")
    mesh = build_mesh(ParallelismConfig())
    policy = resolve_precision(PrecisionConfig(Precision[precision]), mesh.device)
    model, ops = Model.of(config.model, policy), select_ops(OpsConfig(), mesh.device)
    part = model.build(ops, config.seed)
    materialize(model, [part], mesh.device)
    model.fill_buffers(part, ops, config.seed)
    set_dtypes(model, part, policy)
    load_tensors(path, model_tensors(model, [part]), strict=False, verified=True)
    return model, StageRunner([part.eval()], mesh), load_tokenizer(path / "tokenizer"), config
