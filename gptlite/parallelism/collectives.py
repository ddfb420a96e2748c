"""Collectives used outside layers."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from gptlite.parallelism.boxes import Cut
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.torch_private import all_gather_single

T = TypeVar("T")
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(tensor: Tensor, mesh: Mesh, axes: Sequence[str] | None = None, op: str = "sum") -> Tensor:
    """Reduce a tensor in place over `axes`, or over the world if None, and return it. `op` is a key of OPS."""
    if mesh.world_size == 1:
        return tensor
    if axes is None:
        dist.all_reduce(tensor, OPS[op])
        return tensor
    for axis in axes:  # there are no groups over several axes
        if mesh.size(axis) > 1:
            dist.all_reduce(tensor, OPS[op], group=mesh.group(axis))
    return tensor


def sum_over_cuts(tensors: Sequence[Tensor], cuts: Sequence[Sequence[Cut]]) -> list[Tensor]:
    """Sum each tensor over the ranks along the mesh axes in its `cuts`. All tensors must have the same dtype, since the
    tensors summed along an axis are exchanged together.

    The bits of a tensor's sum do not depend on the other tensors in the call. So the copies of a tied embedding on the
    first and the last pipeline stage get equal sums, although each is summed together with different parameters.
    """
    found = list(tensors)
    by_axis: dict[str, tuple[Cut, list[int]]] = {}
    for index, each in enumerate(cuts):
        for cut in each:
            by_axis.setdefault(cut.axis, (cut, []))[1].append(index)
    for _, (cut, places) in sorted(by_axis.items()):  # sorted: all ranks must issue the collectives in the same order
        flat = torch.cat([found[index].flatten() for index in places])
        summed = _ordered_sum(flat.to(cut.device), cut.group).to(flat.device)
        parts = summed.split([found[index].numel() for index in places])
        for index, part in zip(places, parts, strict=True):
            found[index] = part.view_as(found[index])
    return found


def _ordered_sum(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, each element in rank order. With all_reduce, the order would depend on the element's position."""
    size = group.size()
    sent = F.pad(flat, (0, -len(flat) % size))  # all_to_all_single and the gather need equal parts
    received, out = torch.empty_like(sent), torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    mine, *others = received.view(size, -1).unbind()
    mine = mine.clone()
    for other in others:
        mine += other
    all_gather_single(out, mine, group=group)
    return out[: len(flat)]


def gather_objects(mesh: Mesh, value: T) -> list[T]:
    """Return every rank's value in rank order, on every rank. Values are pickled and should be small."""
    if mesh.world_size == 1:
        return [value]
    values: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(values, value)
    return values
