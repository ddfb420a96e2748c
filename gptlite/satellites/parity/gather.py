"""Assembly of sharded tensors on rank 0. The ranks that held each part are recorded, and replicated parts compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gptlite.parallelism.boxes import local_box, local_tensor

Box = tuple[tuple[int, int], ...]  # (start, stop) along each dim, in the whole tensor


@dataclass(frozen=True)
class Disagreement:
    """Part of a tensor of which two ranks, or one rank twice, hold different copies. `error` is the maximum absolute
    difference."""

    box: Box
    ranks: tuple[int, int]
    error: float


@dataclass(frozen=True)
class Whole:
    """Assembled tensor: fp32 on the CPU, with NaN in elements that no rank held. `holders` has the ranks that held each
    part."""

    value: Tensor
    holders: dict[Box, list[int]]
    disagreements: list[Disagreement]


class Part(NamedTuple):
    """Part of a tensor that one rank holds, ready to be sent. `shape` is the shape of the whole tensor."""

    name: str
    shape: tuple[int, ...]
    box: Box
    value: Tensor


def box_of(tensor: Tensor) -> Box:
    """Return the box of a tensor that this rank holds. Raises ValueError if the tensor is a gradient that has not been
    reduced, or if its local shape does not fit its placements."""
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not reduced: {tensor.placements}")
    sizes, starts = local_box(tensor)
    if (shape := tuple(local_tensor(tensor).shape)) != sizes:
        raise ValueError(
            f"this rank's shard of a tensor of shape {tuple(tensor.shape)} has shape {shape}, not {sizes} as its "
            "placements require"
        )
    return tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))


def gather(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Whole] | None:
    """Return all named tensors, assembled, on rank 0, and None on other ranks. Without a process group, there is one
    rank.

    Collective over the world: every rank calls it with the tensors that it holds. A rank may hold a tied embedding
    twice. Rank 0 receives a copy of every rank's parts, so its memory must hold the model several times.
    """
    mine = [
        Part(
            name, tuple(tensor.shape), box_of(tensor), local_tensor(tensor).detach().to("cpu", torch.float32, copy=True)
        )
        for name, tensor in tensors
    ]
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return assemble([mine])
    # gather_object takes a list, to be filled, only on the receiving rank.
    shares: list[list[Part]] | None = [mine] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, shares)
    return None if shares is None else assemble(shares)


def assemble(shares: list[list[Part]]) -> dict[str, Whole]:
    """Return whole tensors from the parts of ranks 0, 1, ... Raises ValueError if ranks disagree about a shape."""
    wholes: dict[str, Whole] = {}
    for rank, parts in enumerate(shares):
        for name, shape, box, value in parts:
            whole = wholes.setdefault(name, Whole(torch.full(shape, torch.nan), {}, []))
            if tuple(whole.value.shape) != shape:
                raise ValueError(f"{name} has shape {shape} on rank {rank}, {tuple(whole.value.shape)} on a lower rank")
            if value.numel():
                _place(whole, box, rank, value)
    return wholes


def _place(whole: Whole, box: Box, rank: int, part: Tensor) -> None:
    """Store the first copy of a part as the value; compare later copies with it."""
    target = whole.value[tuple(slice(*bounds) for bounds in box)]
    holders = whole.holders.setdefault(box, [])
    if not holders:
        target.copy_(part)
    elif not torch.equal(target, part):
        error = (target - part).abs().max().item()
        whole.disagreements.append(Disagreement(box, (holders[0], rank), error))
    if rank not in holders:
        holders.append(rank)
