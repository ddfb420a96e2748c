"""Tensors that ranks hold parts of, put together on rank 0, with who held which part and whether copies agree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gptlite.parallelism.boxes import local_box, local_part

Box = tuple[tuple[int, int], ...]  # (start, stop) along each dim, in the whole tensor


@dataclass(frozen=True)
class Disagreement:
    """Two ranks, or two parts of one, hold the same of a tensor, and not the same bits. `error` is the largest."""

    box: Box
    ranks: tuple[int, int]
    error: float


@dataclass(frozen=True)
class Whole:
    """A tensor put together: fp32 on the CPU, NaN where no rank held anything; `holders` says who held what."""

    value: Tensor
    holders: dict[Box, list[int]]
    disagreements: list[Disagreement]


@dataclass(frozen=True)
class _Parts:
    """One rank's share, ready to be sent: what it holds of which tensor, and the elements in a row."""

    names: list[str]
    shapes: list[tuple[int, ...]]
    boxes: list[Box]
    elements: Tensor


def box_of(tensor: Tensor) -> Box:
    """The part of a tensor that this rank holds. Raises ValueError for a gradient that is not reduced, or if it has
    another shape than its placements say."""
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not reduced: {tensor.placements}")
    sizes, starts = local_box(tensor)
    if (shape := tuple(local_part(tensor).shape)) != sizes:
        raise ValueError(f"a rank has {shape} of a tensor of shape {tuple(tensor.shape)}, and should have {sizes}")
    return tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))


def gather(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Whole] | None:
    """Every named tensor whole on rank 0, None elsewhere; without a process group there is one rank.

    A collective over the world: every rank calls it, with what it holds; a tied embedding may be held twice. Rank 0
    has a copy of every rank's parts meanwhile, so it is for models of which some fit its memory.
    """
    mine = _parts(tensors)
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return assemble([mine])
    shares: list[_Parts] | None = [mine] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, shares)
    return None if shares is None else assemble(shares)


def _parts(named: Iterable[tuple[str, Tensor]]) -> _Parts:
    pairs = list(named)
    flat = [local_part(tensor).reshape(-1).to("cpu", torch.float32) for _, tensor in pairs]
    return _Parts(
        [name for name, _ in pairs],
        [tuple(tensor.shape) for _, tensor in pairs],
        [box_of(tensor) for _, tensor in pairs],
        torch.cat(flat) if flat else torch.zeros(0),
    )


def assemble(shares: list[_Parts]) -> dict[str, Whole]:
    """Wholes from the parts of ranks 0, 1, ... Raises ValueError where ranks disagree about a shape."""
    wholes: dict[str, Whole] = {}
    for rank, share in enumerate(shares):
        offset = 0
        for name, shape, box in zip(share.names, share.shapes, share.boxes, strict=True):
            whole = wholes.setdefault(name, Whole(torch.full(shape, torch.nan), {}, []))
            if tuple(whole.value.shape) != shape:
                raise ValueError(f"{name} has shape {shape} on rank {rank}, {tuple(whole.value.shape)} before it")
            extent = [stop - start for start, stop in box]
            count = torch.Size(extent).numel()
            if count:
                _place(whole, box, rank, share.elements[offset : offset + count].view(extent))
            offset += count
    return wholes


def _place(whole: Whole, box: Box, rank: int, part: Tensor) -> None:
    """The first copy of a box is the value; later ones are compared with it."""
    there = whole.value[tuple(slice(*bounds) for bounds in box)]
    holders = whole.holders.setdefault(box, [])
    if not holders:
        there.copy_(part)
    elif not torch.equal(there, part):
        error = (there - part).abs().max().item()
        whole.disagreements.append(Disagreement(box, (holders[0], rank), error))
    if rank not in holders:
        holders.append(rank)
