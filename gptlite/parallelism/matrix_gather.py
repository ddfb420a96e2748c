"""Gather of whole tensors from shards: each tensor goes to one rank, which changes it and scatters the shards back.

Used by code that needs whole matrices. Ranks that hold shards of a tensor, or copies of them, share the work: each
changes an equal number of whole tensors at a time, as many as fit in `BATCH` elements, and at least one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from gptlite.parallelism.boxes import Cut, copies, cuts, local_part

BATCH = 2**24  # elements that a rank changes together: 64 MiB in fp32

Change = Callable[[dict[int, Tensor]], Mapping[int, Tensor]]  # of whole tensors by number, to others of their shapes
Level = tuple[Cut, tuple[int, ...]]  # a cut, and the shape of what it has cut


def change_whole(tensors: Sequence[Tensor], change: Change) -> None:
    """Replace each tensor by the result of `change` on the whole tensor, in place. Collective over the ranks that hold
    shards or copies.

    The whole tensor has the same bits however it was sharded. Only one rank computes the change.
    """
    alike: dict[tuple[str, ...], list[int]] = {}
    for index, tensor in enumerate(tensors):
        alike.setdefault(tuple(cut.axis for cut in _held_along(tensor)), []).append(index)
    for _, places in sorted(alike.items()):  # sorted: all ranks must run the rounds in the same order
        places.sort(key=lambda index: -tensors[index].numel())  # equal sizes per round: the largest sets its duration
        ranks = prod(cut.size for cut in _held_along(tensors[places[0]]))
        while places:
            several = ranks * max(1, BATCH // max(1, tensors[places[0]].numel()))
            _round({index: tensors[index] for index in places[:several]}, change)
            del places[:several]


def _held_along(tensor: Tensor) -> list[Cut]:
    """Return the axes whose ranks share the work of a tensor."""
    return [*copies(tensor), *cuts(tensor)]


def _round(tensors: Mapping[int, Tensor], change: Change) -> None:
    """Process an equal number of tensors per rank: gather along one axis after the other, then scatter back in reverse
    order.

    A tensor's owner is given by a coordinate on each axis. Along each axis, ranks exchange the tensors that they hold.
    """
    levels = {index: _levels(tensor) for index, tensor in tensors.items()}
    held = {index: local_part(tensor) for index, tensor in tensors.items()}
    for index, each in levels.items():
        # An offloaded tensor is on the host.
        held[index] = held[index].to(each[0][0].device) if each else held[index]
    like, way, stride = next(iter(held.values())), [], 1
    for level in range(len(next(iter(levels.values())))):
        if not held:  # nor have the ranks it would exchange with, which have its coordinates on the earlier axes
            break
        at = {index: levels[index][level] for index in held}
        size = next(iter(at.values()))[0].size
        # The owners' coordinates are the digits of `place`, in a base of the axes' sizes.
        owners = {index: place // stride % size for place, index in enumerate(tensors) if index in held}
        held = _collect(held, owners, at, like)
        way.append((owners, at))
        stride *= size
    held = dict(change(held)) if held else held
    for owners, at in reversed(way):
        held = _give_back(held, owners, at, like)
    for index, tensor in tensors.items():
        local_part(tensor).copy_(held[index])


def _levels(tensor: Tensor) -> list[Level]:
    """Axes with copies of a tensor, then its shardings from the last applied to the first."""
    shape, found = list(tensor.shape), []
    for cut in cuts(tensor):
        found.append((cut, tuple(shape)))
        shape[cut.dim] = cut.lengths(shape[cut.dim])[cut.rank]
    return [*((cut, tuple(shape)) for cut in copies(tensor)), *found[::-1]]


def _collect(
    held: Mapping[int, Tensor], owners: dict[int, int], at: dict[int, Level], like: Tensor
) -> dict[int, Tensor]:
    """Exchange shards along an axis and concatenate those of the tensors that this rank owns. Copies need no exchange,
    only a choice."""
    ((cut, _), *_) = at.values()
    if cut.dim < 0:
        return {index: held[index] for index in owners if owners[index] == cut.rank}
    sent = [[held[index] for index in owners if owners[index] == rank] for rank in range(cut.size)]
    mine = [index for index in owners if owners[index] == cut.rank]
    shapes = [[_piece(at[index], rank) for index in mine] for rank in range(cut.size)]
    received = _exchange(sent, shapes, like, cut.group)
    return {index: torch.cat(pieces, at[index][0].dim) for index, *pieces in zip(mine, *received, strict=True)}


def _give_back(
    held: Mapping[int, Tensor], owners: dict[int, int], at: dict[int, Level], like: Tensor
) -> dict[int, Tensor]:
    """Return this rank's shards along an axis, received from the owners of the concatenated tensors."""
    ((cut, _), *_) = at.values()
    theirs = [[index for index in owners if owners[index] == rank] for rank in range(cut.size)]
    cut_up = [_pieces(held[index], at[index]) for index in theirs[cut.rank]]
    sent = [[pieces[rank] for pieces in cut_up] for rank in range(cut.size)]
    shapes = [[_piece(at[index], cut.rank) for index in each] for each in theirs]
    received = _exchange(sent, shapes, like, cut.group)
    return {
        index: piece
        for each, pieces in zip(theirs, received, strict=True)
        for index, piece in zip(each, pieces, strict=True)
    }


def _pieces(whole: Tensor, level: Level) -> Sequence[Tensor]:
    cut, shape = level
    if cut.dim < 0:
        return [whole] * cut.size
    return whole.split(cut.lengths(shape[cut.dim]), cut.dim)


def _piece(level: Level, rank: int) -> tuple[int, ...]:
    """Return the shape of a rank's shard at that level."""
    cut, shape = level
    if cut.dim < 0:
        return shape
    return (*shape[: cut.dim], cut.lengths(shape[cut.dim])[rank], *shape[cut.dim + 1 :])


def _exchange(
    sent: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    like: Tensor,
    group: dist.ProcessGroup,
) -> list[list[Tensor]]:
    """Send each rank of a group its tensors, and return the tensors received from each, of known shapes."""
    # torch.cat refuses an empty list: a rank may have nothing to send.
    flat = torch.cat([like.new_empty(0), *(tensor.flatten() for tensors in sent for tensor in tensors)])
    into = [sum(map(prod, each)) for each in shapes]
    received = like.new_empty(sum(into))
    out = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
    dist.all_to_all_single(received, flat, into, out, group=group)
    found = []
    for part, each in zip(received.split(into), shapes, strict=True):
        pieces = part.split([prod(shape) for shape in each])
        found.append([piece.view(shape) for piece, shape in zip(pieces, each, strict=True)])
    return found
