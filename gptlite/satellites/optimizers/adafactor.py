"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5): factored second moments.

torch's implementation is not used. It applies epsilon in a different place than the paper does, which changes
updates for gradients as large as 1e-4, and it computes norms one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from gptlite.optimizer.base import BuildContext, OwnOptimizer, local_gradients, local_parameters, step_count
from gptlite.optimizer.clip import square_norms
from gptlite.parallelism.boxes import ShardedDim, cuts, local_box, local_tensor
from gptlite.parallelism.collectives import sum_over_cuts
from gptlite.satellites.optimizers.configs import AdafactorConfig


@dataclass
class _Work:
    """Inputs of one parameter's step, such as the step number, shardings (`cuts`) and local shard of the gradient."""

    parameter: nn.Parameter
    group: dict[str, Any]
    state: dict[str, Tensor]
    step: int
    cuts: list[ShardedDim]
    gradient: Tensor

    @property
    def is_matrix(self) -> bool:
        """True if the parameter's second moments are factored."""
        return self.parameter.ndim > 1

    @property
    def keep(self) -> float:
        """beta2 of this step: 1 - t^-decay, which needs no bias correction."""
        return 1.0 - self.step ** -self.group["decay"]

    def along(self, dim: int) -> list[ShardedDim]:
        """Return the shardings of one dim, counted from the last, which is -1."""
        return [cut for cut in self.cuts if cut.dim == self.parameter.ndim + dim]


def build(config: AdafactorConfig, context: BuildContext) -> Adafactor:
    """Return the optimizer of a configuration."""
    defaults = {"lr": config.lr, "decay": config.decay, "clip_threshold": config.clip_threshold, "weight_decay": 0.0}
    return Adafactor(context.groups, defaults | {"eps": (config.eps1, config.eps2)})


class Adafactor(OwnOptimizer):
    """Adafactor with a relative step size `lr`: the RMS of a step is at most clip_threshold lr max(eps2, RMS(x)).

    The state is the running mean of the squared gradient: for a matrix, that of each row and column (`row_var`,
    `col_var`); for a vector, that of each element (`variance`). A parameter of more than two dims is a stack of
    matrices, its last two dims, as in torch. If parameters are sharded, these means and the RMS of weights and updates
    are reduced over ranks in three reductions per step, each for all parameters together. The updates overwrite the
    gradients, so the only other memory is a temporary of one parameter's size.
    """

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the initial state. `row_var` is sharded like the rows of the matrix, `col_var` like its columns."""
        if parameter.ndim < 2:
            return {"step": step_count(), "variance": torch.zeros_like(parameter)}
        return {"step": step_count(), "row_var": _zeros(parameter, -1), "col_var": _zeros(parameter, -2)}

    def update(self) -> None:
        """Take a step."""
        ready = [(group, parameter) for group in self.param_groups for parameter in self.ready(group)]
        if not ready:
            return
        parameters = [parameter for _, parameter in ready]
        steps, gradients = self.counted(parameters), local_gradients(parameters)
        works = [
            _Work(parameter, group, self.state_of(parameter), step, cuts(parameter), gradient)
            for (group, parameter), step, gradient in zip(ready, steps, gradients, strict=True)
        ]
        _average(works)
        _divide([work for work in works if work.is_matrix])
        _apply(works)


def _zeros(parameter: Tensor, without: int) -> Tensor:
    """Return zeros with all dims of a parameter except one, sharded like these dims."""
    without %= parameter.ndim
    sizes = list(local_box(parameter)[0])
    del sizes[without]
    local = torch.zeros(sizes, dtype=parameter.dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return local
    placements = [_placed(placement, without) for placement in parameter.placements]
    whole = torch.empty([*parameter.shape[:without], *parameter.shape[without + 1 :]], device="meta")
    mesh, shape, stride = parameter.device_mesh, whole.shape, whole.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _placed(placement: Placement, without: int) -> Placement:
    """Return the placement of a tensor that lacks one dim of a tensor with this placement."""
    dim = getattr(placement, "dim", -1)
    if dim == without:
        return Replicate()
    return Shard(dim - 1) if dim > without else placement  # FSDP2, which makes strided placements, shards only dim 0


def _average(works: Sequence[_Work]) -> None:
    """Update the running means with the squared gradients. Also divide the gradients of vectors by the square root of
    their running mean."""
    matrices = [work for work in works if work.is_matrix]
    rows, columns = [], []
    for work in works:
        squares = work.gradient.square().add_(work.group["eps"][0])  # added before averaging, as in the paper
        if work.is_matrix:
            rows.append(squares.sum(-1))
            columns.append(squares.sum(-2))
        else:
            variance = local_tensor(work.state["variance"]).lerp_(squares, 1 - work.keep)
            work.gradient.mul_(variance.rsqrt())
    sums = sum_over_cuts([*rows, *columns], [w.along(-1) for w in matrices] + [w.along(-2) for w in matrices])
    for key, dim, each in (("row_var", -1, sums[: len(rows)]), ("col_var", -2, sums[len(rows) :])):
        for work, total in zip(matrices, each, strict=True):
            local_tensor(work.state[key]).lerp_(total / work.parameter.shape[dim], 1 - work.keep)


def _divide(matrices: Sequence[_Work]) -> None:
    """Divide each gradient by the square root of R C / mean(R), where R is `row_var` and C is `col_var`."""
    # Summed in fp64, so that the mean in fp32 does not depend on how the matrix is sharded.
    sums = [local_tensor(work.state["row_var"]).sum(-1, dtype=torch.float64) for work in matrices]
    for work, total in zip(matrices, sum_over_cuts(sums, [work.along(-2) for work in matrices]), strict=True):
        rows, columns = (local_tensor(work.state[key]) for key in ("row_var", "col_var"))
        mean = (total / work.parameter.shape[-2]).to(rows.dtype).unsqueeze(-1)
        # Two square roots instead of one of the product, since the product of two small means underflows fp32.
        work.gradient.mul_((rows / mean).rsqrt_().unsqueeze(-1)).mul_(columns.rsqrt().unsqueeze(-2))


def _apply(works: Sequence[_Work]) -> None:
    """Clip each update by its RMS, scale it by lr and the parameter's RMS, and apply it. Does not wait for the
    device."""
    weights, updates = local_parameters(work.parameter for work in works), [work.gradient for work in works]
    table = torch.stack([square_norms(weights), square_norms(updates)], 1)
    for work, weight, squares in zip(
        works, weights, sum_over_cuts(table.unbind(), [work.cuts for work in works]), strict=True
    ):
        lr, (_, least) = work.group["lr"], work.group["eps"]
        weight_rms, update_rms = (squares / work.parameter.numel()).sqrt().unbind()
        size = weight_rms.clamp(min=least) / (update_rms / work.group["clip_threshold"]).clamp(min=1.0)
        weight.mul_(1 - lr * work.group["weight_decay"])
        weight.sub_(work.gradient.mul_((lr * size).to(weight.dtype)))
