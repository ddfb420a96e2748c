"""Collectives that are no part of a layer."""

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
    """Reduces a tensor in place over some axes, or over the world, and returns it."""
    if mesh.world_size == 1:
        return tensor
    if axes is None:
        dist.all_reduce(tensor, OPS[op])
        return tensor
    for axis in axes:
        if mesh.size(axis) > 1:
            dist.all_reduce(tensor, OPS[op], group=mesh.group(axis))
    return tensor


def sum_over_cuts(tensors: Sequence[Tensor], cuts: Sequence[Sequence[Cut]]) -> list[Tensor]:
    """Sums each tensor over the cuts given for it; all of an axis go together. Tensors of one dtype.

    The bits of a sum do not depend on what is summed beside it, so that two ranks that hold copies of a parameter among
    different ones (the ends of a pipeline, a tied embedding) get the same.
    """
    found = list(tensors)
    by_axis: dict[str, tuple[Cut, list[int]]] = {}
    for index, each in enumerate(cuts):
        for cut in each:
            by_axis.setdefault(cut.axis, (cut, []))[1].append(index)
    for _, (cut, places) in sorted(by_axis.items()):  # in the same order on all ranks
        flat = torch.cat([found[index].flatten() for index in places])
        summed = _ordered_sum(flat.to(cut.device), cut.group).to(flat.device)
        parts = summed.split([found[index].numel() for index in places])
        for index, part in zip(places, parts, strict=True):
            found[index] = part.view_as(found[index])
    return found


def _ordered_sum(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, each element's in the order of ranks: all_reduce's depends on where an element lies."""
    size = group.size()
    sent = F.pad(flat, (0, -len(flat) % size))
    received, out = torch.empty_like(sent), torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    mine, *others = received.view(size, -1).unbind()
    mine = mine.clone()
    for other in others:
        mine += other
    all_gather_single(out, mine, group=group)
    return out[: len(flat)]


def gather_objects(mesh: Mesh, value: T) -> list[T]:
    """Every rank's value, in the order of ranks, on every rank. Values are pickled: small ones only."""
    if mesh.world_size == 1:
        return [value]
    values: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(values, value)
    return values
