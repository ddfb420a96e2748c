"""Squared norms of the gradients of groups of samples, which are read before they are added up."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from gptlite.optimizer.clip import local_grad_norm, square_norms
from gptlite.parallelism.axes import DATA_AXES
from gptlite.parallelism.boxes import local_tensor
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.tensor import axis_of, is_cut
from gptlite.satellites.compressed.buckets import Bucket
from gptlite.trainer.state import TrainState


class GroupSquares:
    """Sum of the squared norms of the groups' gradients in a step, as far as this rank's elements go.

    With several data ranks, a group is what a rank reduces at once (`observe`); with one, a micro-batch (`watch`).
    Elements that several tensor ranks hold count on the first. Some gradients are only complete after they are added
    up, and stay outside of all sums: `left_out`.
    """

    def __init__(self, state: TrainState, mesh: Mesh) -> None:
        self._mesh, self._left_out = mesh, left_out(state, mesh)
        self._counted = {id(p) for p in state.weights() if is_cut(p) or mesh.is_first("uncut")}
        self._counted -= set(map(id, self._left_out))
        self._total = torch.zeros((), dtype=torch.float64, device=mesh.device)

    def watch(self, parameters: Collection[nn.Parameter]) -> None:
        """Read the gradient of each backward pass, before autograd adds it to the parameter's."""
        for parameter in parameters:
            if id(parameter) in self._counted and parameter.requires_grad:
                parameter.register_hook(self._add)

    def observe(self, bucket: Bucket, flat: Tensor) -> None:
        """Read this rank's gradients of a bucket [rows * n], before they are summed over the data ranks."""
        parameters, row = bucket.parameters, bucket.row(flat)
        counts = [id(parameter) in self._counted for parameter in parameters]
        if all(counts):
            self._add(flat)
            return
        for counted, columns in zip(counts, row.split(bucket.sizes, dim=1), strict=True):
            if counted:
                self._add(columns)

    def take(self) -> Tensor:
        """Return the sum, fp64 [], and begin the next step."""
        total = self._total.clone()
        self._total.zero_()
        return total

    def outside(self) -> Tensor:
        """Return the squared norm, fp64 [], of those gradients left out that count on this rank, once complete."""
        mesh = self._mesh
        alone = all(mesh.coordinate(axis) == 0 for axis in DATA_AXES)
        counted = (p for p in self._left_out if mesh.is_first("uncut") or is_cut(p))
        counted = [p for p in counted if (mesh.is_first("all") if p.ndim else alone)]
        return local_grad_norm(counted).to(mesh.device).double() ** 2

    @torch.no_grad()
    def _add(self, gradient: Tensor) -> None:
        if gradient.numel():
            self._total += square_norms([local_tensor(gradient)])[0]


def left_out(state: TrainState, mesh: Mesh) -> list[nn.Parameter]:
    """Return the parameters whose gradients `finish_gradients` completes after the sums over data ranks.

    These are parameters without dims, if there are several data ranks; with sequence parallelism, those that are not
    sharded (norms, biases, positions); those of a norm of heads that tensor ranks divide; and tied ones of a pipeline.
    """
    weights = list(state.weights())
    partial = {id(p) for p in weights if p.ndim == 0} if mesh.fsdp_size > 1 else set()
    for part in state.parts:
        if mesh.size("tp") > 1 and (axis := axis_of(part)) is not None:
            of_heads = [module for module in part.modules() if getattr(module, "of_heads", False) is True]
            sliced = part.parameters() if axis.sequence else (p for each in of_heads for p in each.parameters())
            partial |= {id(p) for p in sliced if not is_cut(p)}
    if mesh.size("pp") > 1:
        partial |= {id(p) for pair in state.model.tied_copies(state.parts) for p in pair if p is not None}
    return [p for p in weights if id(p) in partial]
