"""Test cases of cross entropy over all columns of the logits, and over each tensor-parallel rank's columns."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gptlite.kernels.case import Case, Inputs, Tensors, times_first

OPS = torch.ops.gptlite
IGNORE, Z_LOSS = -100, 1e-3
# Sizes for CPUs, then for GPUs. The latter exceed the cache.
VOCABULARY = ((1024, 8192), (1024, 50304)), ((8192, 8192), (8192, 50304))


def _loss_inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Inputs:
    targets = torch.randint(width, (rows,), device=device)
    targets[0] = IGNORE
    logits = torch.randn(rows, width, dtype=dtype, device=device)
    return {"logits": logits, "targets": targets, "dy": torch.ones(rows, device=device)}


def _stats(inputs: Inputs) -> Tensors:
    """Return the statistics of two parts of the columns, as two tensor-parallel ranks compute them."""
    return tuple(OPS.cross_entropy_stats(part, inputs["targets"], at, IGNORE) for at, part in _parts(inputs))


def _losses_of_stats(inputs: Inputs, parts: Tensors) -> Tensors:
    """Return the losses and the log-sum-exps over all columns, from the statistics of the parts."""
    stats = torch.stack(parts)
    log_sum, target = stats[..., 0].logsumexp(0), stats[..., 1].sum(0)
    losses = log_sum - target + Z_LOSS * log_sum**2
    return losses * (inputs["targets"] != IGNORE), log_sum


def _sharded_gradient(inputs: Inputs, results: Tensors) -> Tensors:
    for at, part in _parts(inputs):
        OPS.cross_entropy_gradient_(part, inputs["targets"], results[1], at, Z_LOSS, IGNORE)
    return (inputs["logits"],)


def _parts(inputs: Inputs) -> list[tuple[int, Tensor]]:
    cut = inputs["logits"].shape[1] // 3
    return [(0, inputs["logits"][:, :cut]), (cut, inputs["logits"][:, cut:])]


def _torch_loss(inputs: Inputs, z_loss: float = Z_LOSS) -> Tensors:
    logits, targets = inputs["logits"], inputs["targets"]
    x = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(x, targets, reduction="none", ignore_index=IGNORE)
    return (losses + z_loss * x.logsumexp(1) ** 2 * (targets != IGNORE) if z_loss else losses,)


def _whole_loss(name: str, z_loss: float) -> Case:
    def kernel(inputs: Inputs) -> Tensors:
        logits, targets = inputs["logits"], inputs["targets"]
        return OPS.cross_entropy_(logits, targets, z_loss, IGNORE, True), logits

    return Case(
        (f"cross_entropy_{name}", f"cross_entropy_{name} gradient"),
        _loss_inputs,
        kernel,
        None,
        lambda given: _torch_loss(given, z_loss),
        ("logits",),
        *VOCABULARY,
        traffic=times_first(2),
    )


LOSSES = (
    _whole_loss("", Z_LOSS),
    _whole_loss(" plain", 0.0),
    Case(
        ("cross_entropy_stats", "cross_entropy_gradient_"),
        _loss_inputs,
        _stats,
        _sharded_gradient,
        _torch_loss,
        ("logits",),
        *VOCABULARY,
        traffic=times_first(1, 2),
        between=_losses_of_stats,
    ),
)
