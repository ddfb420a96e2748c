"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5): second moments by row and by column.

torch's own puts the small number that it divides by elsewhere than the paper: it then matters to gradients of 1e-4. And
it asks for norms one parameter and one rank after the other.
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
    """One parameter in a step: the number of that step, where its whole is cut, this rank's part of its gradient."""

    parameter: nn.Parameter
    group: dict[str, Any]
    state: dict[str, Tensor]
    step: int
    cuts: list[Cut]
    gradient: Tensor

    @property
    def is_matrix(self) -> bool:
        """Whether its second moments are factored."""
        return self.parameter.ndim > 1

    @property
    def keep(self) -> float:
        """beta2 of this step: 1 - t^-decay, which needs no correction of a bias."""
        return 1.0 - self.step ** -self.group["decay"]

    def along(self, dim: int) -> list[Cut]:
        """The cuts of a dim."""
        return [cut for cut in self.cuts if cut.dim == dim]


def build(config: AdafactorConfig, context: BuildContext) -> Adafactor:
    """The optimizer of a configuration."""
    defaults = {"lr": config.lr, "decay": config.decay, "clip_threshold": config.clip_threshold, "weight_decay": 0.0}
    return Adafactor(context.groups, defaults | {"eps": (config.eps1, config.eps2)})


class Adafactor(OwnOptimizer):
    """A step of lr max(eps2, RMS(x)) in the RMS of a parameter, or less: `lr` is the paper's relative step size.

    Of a matrix it keeps the mean square of each row's and each column's gradients (`row_var`, `col_var`), of a vector
    that of each element. Where ranks hold pieces, these means, and the RMS of weights and updates, are summed over
    ranks: of all parameters together, three times a step. No memory is taken beside these but a moment's for one
    parameter: a step writes the updates over the gradients.
    """

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Vectors are cut as the dim is that they are of, and the same on all ranks along the other."""
        if parameter.ndim < 2:
            return {"step": step_count(), "variance": torch.zeros_like(parameter)}
        return {"step": step_count(), "row_var": _zeros_along(parameter, 0), "col_var": _zeros_along(parameter, 1)}

    def update(self) -> None:
        """Takes a step."""
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
    """One zero for each index of a dim, cut as that is."""
    local = torch.zeros(local_box(parameter)[0][dim], dtype=parameter.dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return local
    placements = [_of_vector(placement, dim) for placement in parameter.placements]
    shape = torch.Size([parameter.shape[dim]])
    return DTensor.from_local(local, parameter.device_mesh, placements, run_check=False, shape=shape, stride=(1,))


def _of_vector(placement: Placement, dim: int) -> Placement:
    """How a vector along a dim of a matrix lies where the matrix is placed so."""
    if getattr(placement, "dim", None) != dim:
        return Replicate()
    return placement if dim == 0 else Shard(0)  # of matrices, FSDP2 and so the odd placements cut rows alone


def _average(works: Sequence[_Work]) -> None:
    """Takes the squared gradients into the running means. Vectors are then divided by the roots of theirs."""
    matrices = [work for work in works if work.is_matrix]
    rows, columns = [], []
    for work in works:
        squares = work.gradient.square().add_(work.group["eps"][0])
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
    """Divides each gradient by the root of R C / mean(R)."""
    sums = [local_tensor(work.state["row_var"]).sum(dtype=torch.float64) for work in matrices]
    for work, total in zip(matrices, sum_over_cuts(sums, [work.along(0) for work in matrices]), strict=True):
        rows, columns = (local_tensor(work.state[key]) for key in ("row_var", "col_var"))
        mean = (total / work.parameter.shape[0]).to(rows.dtype)
        # Two roots, not one of the product: that of two small squares is less than fp32 has.
        work.gradient.mul_((rows / mean).rsqrt_()[:, None]).mul_(columns.rsqrt()[None, :])


def _apply(works: Sequence[_Work]) -> None:
    """Clips each update by its RMS and takes it, times the RMS of the parameter. Nothing waits for the device."""
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
