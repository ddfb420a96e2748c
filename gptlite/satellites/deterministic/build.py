"""Construction of the exact sums of a run with `parallelism.deterministic=true`."""

import torch
from torch import nn

from gptlite.config.completed import with_vocabulary
from gptlite.config.schema import Config
from gptlite.models.model import Model
from gptlite.ops.select import Ops
from gptlite.parallelism.mesh import Mesh
from gptlite.precision import resolve_precision
from gptlite.satellites.deterministic.check import PRECISION, refusal
from gptlite.satellites.deterministic.reduction import ExactReduction
from gptlite.torch_private.modules import BatchNorm

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def build_reduction(config: Config, mesh: Mesh) -> ExactReduction:
    """Return the reduction. On a CPU, this process computes with one thread from now on.

    GEMMs and reductions of a CPU split their sums among threads, so their bits depend on the number of threads, which
    the launcher divides among the ranks of a machine. Raises ConfigError for a precision other than fp32, and for
    models that depend on the samples of a rank.
    """
    policy = resolve_precision(config.precision, mesh.device)
    if policy.compute_dtype != torch.float32:
        raise refusal(f"precision={config.precision.dtype.value}, here {policy.name}", PRECISION, "precision=fp32")
    model = Model.of(with_vocabulary(config, 2).model)  # any size: the layers' kinds matter
    if not model.spec.keyed_dropout:
        _refuse_dependence(model)
    if mesh.device.type == "cpu":
        torch.set_num_threads(1)
    return ExactReduction(mesh, config.parallelism.zero, config.data.global_batch_size)


def _refuse_dependence(model: Model) -> None:
    """Raise ConfigError for batch norms and dropout in a model whose dropout is not keyed by sample."""
    for name, module in model.build(Ops(), 0).named_modules():
        if isinstance(module, BatchNorm):
            raise refusal(f"the {model.spec.name} model", f"{name} averages over the samples of a pass", "group norm")
        if isinstance(module, DROPOUTS) and module.p > 0:
            raise refusal(
                f"the {model.spec.name} model",
                f"the masks of {name} come from torch's generator, in the order of a rank's passes",
                "a dropout of 0",
            )
