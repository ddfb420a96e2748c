"""Collectives that are no part of a layer."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from gptlite.parallelism.mesh import Mesh

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


def gather_objects(mesh: Mesh, value: T) -> list[T]:
    """Every rank's value, in the order of ranks, on every rank. Values are pickled: small ones only."""
    if mesh.world_size == 1:
        return [value]
    values: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(values, value)
    return values
