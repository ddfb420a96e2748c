"""Updates of whole tensors that are sharded: one rank gathers a tensor, changes it, and scatters the shards back.

Used by optimizers that work on whole matrices. The ranks that hold shards or copies of tensors divide the tensors among
themselves. They work in rounds, in which each rank changes as many whole tensors as fit in `BATCH` elements, and at
least one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from gptlite.parallelism.boxes import ShardedDim, copies, cuts, local_tensor

BATCH = 2**24  # elements that a rank changes in a round: 64 MiB in fp32

Change = Callable[[dict[int, Tensor]], Mapping[int, Tensor]]  # from {index: tensor} to new values of the same shapes
Level = tuple[ShardedDim, tuple[int, ...]]  # a sharding, and the shape of the tensor before it is sharded


def change_whole(tensors: Sequence[Tensor], change: Change) -> None:
    """Replace each tensor in place by the result of `change` on the whole tensor. Collective over the ranks that hold
    shards or copies.

    The bits of the whole tensor do not depend on how it is sharded, and only one rank computes its change.
    """
    alike: dict[tuple[str, ...], list[int]] = {}
    for index, tensor in enumerate(tensors):
        alike.setdefault(tuple(cut.axis for cut in _held_along(tensor)), []).append(index)
    for _, places in sorted(alike.items()):  # sorted: all ranks must run the rounds in the same order
        # Similar sizes go in one round, as the largest tensor determines its duration.
        places.sort(key=lambda index: -tensors[index].numel())
        ranks = prod(cut.size for cut in _held_along(tensors[places[0]]))
        while places:
            several = ranks * max(1, BATCH // max(1, tensors[places[0]].numel()))
            _round({index: tensors[index] for index in places[:several]}, change)
            del places[:several]


def _held_along(tensor: Tensor) -> list[ShardedDim]:
    """Return the axes along which ranks hold copies or shards of a tensor."""
    return [*copies(tensor), *cuts(tensor)]


def _round(tensors: Mapping[int, Tensor], change: Change) -> None:
    """Gather tensors on their owners, one axis after the other, change them, and scatter them back along the axes in
    reverse order.

    A tensor's owner is the rank that changes it. Every rank owns about the same number of tensors. An owner is
    identified by its coordinate on each axis. Along an axis, each rank sends the part of a tensor that it holds to the
    rank with the owner's coordinate.
    """
    levels = {index: _levels(tensor) for index, tensor in tensors.items()}
    held = {index: local_tensor(tensor).detach() for index, tensor in tensors.items()}
    for index, each in levels.items():
        # An offloaded tensor is on the host.
        held[index] = held[index].to(each[0][0].device) if each else held[index]
    like, way, stride = next(iter(held.values())), [], 1
    for level in range(len(next(iter(levels.values())))):
        # If this rank holds nothing, nor do the others along this axis, which have the same earlier coordinates.
        if not held:
            break
        at = {index: levels[index][level] for index in held}
        size = next(iter(at.values()))[0].size
        # The coordinates of an owner are the digits of `place` in the mixed radix of the axes' sizes.
        owners = {index: place // stride % size for place, index in enumerate(tensors) if index in held}
        held = _collect(held, owners, at, like)
        way.append((owners, at))
        stride *= size
    held = dict(change(held)) if held else held
    for owners, at in reversed(way):
        held = _give_back(held, owners, at, like)
    for index, tensor in tensors.items():
        local_tensor(tensor).detach().copy_(held[index])


def _levels(tensor: Tensor) -> list[Level]:
    """Return the axes along which ranks hold copies of a tensor, then its shardings in reverse order of application."""
    shape, levels = list(tensor.shape), []
    for cut in cuts(tensor):
        levels.append((cut, tuple(shape)))
        shape[cut.dim] = cut.lengths(shape[cut.dim])[cut.rank]
    return [*((cut, tuple(shape)) for cut in copies(tensor)), *levels[::-1]]


def _collect(
    held: Mapping[int, Tensor], owners: dict[int, int], at: dict[int, Level], like: Tensor
) -> dict[int, Tensor]:
    """Exchange shards along an axis, and concatenate those of the tensors that this rank owns. Along an axis with
    copies, nothing is exchanged, and each rank keeps the tensors that it owns."""
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
    """Split each tensor that this rank owns into shards along one axis, send each shard to its rank, and return the
    shards received."""
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
    """Return the shape of a rank's shard after this sharding."""
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
    """Send `sent[rank]` to each rank of a group, and return the tensors received from each rank, which have the given
    shapes."""
    # The empty tensor is there because torch.cat refuses an empty list, and a rank may have nothing to send.
    flat = torch.cat([like.new_empty(0), *(tensor.flatten() for tensors in sent for tensor in tensors)])
    into = [sum(map(prod, each)) for each in shapes]
    received = like.new_empty(sum(into))
    out = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
    dist.all_to_all_single(received, flat, into, out, group=group)
    by_rank = []
    for part, each in zip(received.split(into), shapes, strict=True):
        pieces = part.split([prod(shape) for shape in each])
        by_rank.append([piece.view(shape) for piece, shape in zip(pieces, each, strict=True)])
    return by_rank
