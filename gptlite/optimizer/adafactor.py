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
from gptlite.optimizer.config import AdafactorConfig
from gptlite.parallelism.boxes import Cut, cuts, local_box
from gptlite.parallelism.collectives import sum_over_cuts
from gptlite.parallelism.zero import local_tensor


@dataclass
class _Work:
    """Inputs of one parameter's step, such as the step number, shardings (`cuts`) and local shard of the gradient."""

    parameter: nn.Parameter
    group: dict[str, Any]
    state: dict[str, Tensor]
    step: int
    cuts: list[Cut]
    gradient: Tensor

    @property
    def is_matrix(self) -> bool:
        """True if the parameter's second moments are factored."""
        return self.parameter.ndim > 1

    @property
    def keep(self) -> float:
        """beta2 of this step: 1 - t^-decay, which needs no bias correction."""
        return 1.0 - self.step ** -self.group["decay"]

    def along(self, dim: int) -> list[Cut]:
        """Return the shardings of one dim."""
        return [cut for cut in self.cuts if cut.dim == dim]


def build(config: AdafactorConfig, context: BuildContext) -> Adafactor:
    """Return the optimizer of a configuration."""
    defaults = {"lr": config.lr, "decay": config.decay, "clip_threshold": config.clip_threshold, "weight_decay": 0.0}
    return Adafactor(context.groups, defaults | {"eps": (config.eps1, config.eps2)})


class Adafactor(OwnOptimizer):
    """Adafactor with a relative step size `lr`: the RMS of a step is at most clip_threshold lr max(eps2, RMS(x)).

    The state is the running mean of the squared gradient: for a matrix, that of each row and column (`row_var`,
    `col_var`); for a vector, that of each element (`variance`). If parameters are sharded, these means and the RMS of
    weights and updates are reduced over ranks in three reductions per step, each for all parameters together. The
    updates overwrite the gradients, so the only other memory is a temporary of one parameter's size.
    """

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the initial state. `row_var` is sharded like the rows of the matrix, `col_var` like its columns."""
        if parameter.ndim < 2:
            return {"step": step_count(), "variance": torch.zeros_like(parameter)}
        return {"step": step_count(), "row_var": _zeros_along(parameter, 0), "col_var": _zeros_along(parameter, 1)}

    def update(self) -> None:
        """Take a step."""
        found = [(group, parameter) for group in self.param_groups for parameter in self.ready(group)]
        if not found:
            return
        parameters = [parameter for _, parameter in found]
        steps, gradients = self.counted(parameters), local_gradients(parameters)
        works = [
            _Work(parameter, group, self.state_of(parameter), step, cuts(parameter), gradient)
            for (group, parameter), step, gradient in zip(found, steps, gradients, strict=True)
        ]
        _average(works)
        _divide([work for work in works if work.is_matrix])
        _apply(works)


def _zeros_along(parameter: Tensor, dim: int) -> Tensor:
    """Return zeros, one per index of a dim, sharded like that dim."""
    local = torch.zeros(local_box(parameter)[0][dim], dtype=parameter.dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return local
    placements = [_of_vector(placement, dim) for placement in parameter.placements]
    shape = torch.Size([parameter.shape[dim]])
    return DTensor.from_local(local, parameter.device_mesh, placements, run_check=False, shape=shape, stride=(1,))


def _of_vector(placement: Placement, dim: int) -> Placement:
    """Return the placement of a vector along dim `dim` of a matrix that has this placement."""
    if getattr(placement, "dim", None) != dim:
        return Replicate()
    return placement if dim == 0 else Shard(0)  # FSDP2, which makes strided placements, shards only rows


def _average(works: Sequence[_Work]) -> None:
    """Update the running means with the squared gradients. Also divide the gradients of vectors by the square root of
    their running mean."""
    matrices = [work for work in works if work.is_matrix]
    rows, columns = [], []
    for work in works:
        squares = work.gradient.square().add_(work.group["eps"][0])  # added before averaging, as in the paper
        if work.is_matrix:
            rows.append(squares.sum(1))
            columns.append(squares.sum(0))
        else:
            variance = local_tensor(work.state["variance"]).lerp_(squares, 1 - work.keep)
            work.gradient.mul_(variance.rsqrt())
    sums = sum_over_cuts([*rows, *columns], [w.along(1) for w in matrices] + [w.along(0) for w in matrices])
    for key, dim, each in (("row_var", 1, sums[: len(rows)]), ("col_var", 0, sums[len(rows) :])):
        for work, total in zip(matrices, each, strict=True):
            local_tensor(work.state[key]).lerp_(total / work.parameter.shape[dim], 1 - work.keep)


def _divide(matrices: Sequence[_Work]) -> None:
    """Divide each gradient by the square root of R C / mean(R), where R is `row_var` and C is `col_var`."""
    # Summed in fp64, so that the mean in fp32 does not depend on how the matrix is sharded.
    sums = [local_tensor(work.state["row_var"]).sum(dtype=torch.float64) for work in matrices]
    for work, total in zip(matrices, sum_over_cuts(sums, [work.along(0) for work in matrices]), strict=True):
        rows, columns = (local_tensor(work.state[key]) for key in ("row_var", "col_var"))
        mean = (total / work.parameter.shape[0]).to(rows.dtype)
        # Two square roots instead of one of the product, since the product of two small means underflows fp32.
        work.gradient.mul_((rows / mean).rsqrt_()[:, None]).mul_(columns.rsqrt()[None, :])


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
