"""A trained model for reading: from a checkpoint, without what trained it. For the tools."""

import torch

from gptlite.checkpoint.find import find_checkpoint
from gptlite.checkpoint.load import load_tensors, read_config
from gptlite.config import Config, from_yaml
from gptlite.data.tokenizer import Tokenizer, load_tokenizer
from gptlite.errors import ConfigError, did_you_mean
from gptlite.models.gpt.model import GPT
from gptlite.models.parallelize import materialize, set_dtypes
from gptlite.ops.config import OpsConfig
from gptlite.ops.select import select_ops
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.mesh import Mesh, build_mesh
from gptlite.precision import Precision, PrecisionConfig, resolve_precision
from gptlite.trainer.state import model_tensors


def restore(checkpoint: str, precision: str = "auto") -> tuple[GPT, Tokenizer, Config, Mesh]:
    """The model in evaluation mode, its tokenizer, its run's configuration, and the device it is on.

    `checkpoint` is a step folder, or a run folder for its newest. Raises ConfigError for what is not there.
    """
    path = find_checkpoint(checkpoint, "checkpoint")
    config = from_yaml(read_config(path))
    if not (path / "tokenizer").is_dir():
        raise ConfigError(
            f"checkpoint={checkpoint} holds imported weights without a tokenizer: train on from it with your data "
            f"(checkpoint.resume={checkpoint} checkpoint.load=weights), and give the run that comes of it"
        )
    if precision not in Precision.__members__:
        hint = did_you_mean(precision, Precision.__members__)
        raise ConfigError(f"precision={precision} is not one of {', '.join(Precision.__members__)}{hint}")
    mesh = build_mesh(ParallelismConfig())
    with torch.device("meta"):
        model = GPT(config.model, select_ops(OpsConfig(), mesh.device))
    materialize([model], mesh.device)
    set_dtypes(model, resolve_precision(PrecisionConfig(Precision[precision]), mesh.device))
    load_tensors(path, model_tensors([model]), strict=False, verified=True)
    return model.eval(), load_tokenizer(path / "tokenizer"), config, mesh
