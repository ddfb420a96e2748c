"""Movement of records between ranks: tensors of a state filled from them, on any layout, and records of spare ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gptlite.checkpoint.parts import Offer, Parts
from gptlite.parallelism.collectives import gather_bytes
from gptlite.parallelism.in_files import changed
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.messages import decode, encode
from gptlite.parallelism.rank_sync import from_all, together
from gptlite.satellites.elastic.parts import Box, File, KeptPart, Name, rounded
from gptlite.satellites.elastic.shelf import Shelf

BUFFERS = 256 << 20  # bytes that a rank sends, and receives, at a time
UNIT = 16  # of the first byte of a box in a buffer


@dataclass(frozen=True)
class Held:
    """Checkpoint in the memory of the ranks. `holders` has, for each rank that wrote a part, the ranks that hold it;
    `boxes` has the boxes of all parts by key; `mine` has the parts on this rank. All but `mine` is equal on all
    ranks."""

    name: Name
    holders: Mapping[int, Sequence[int]]
    boxes: Mapping[str, Sequence[Box]]
    mine: Mapping[int, KeptPart]

    def source(self, part: int, target: int) -> int:
        """Return the rank from which rank `target` gets a part: itself if it holds the part."""
        ranks = self.holders[part]
        return target if target in ranks else ranks[target % len(ranks)]


@dataclass(frozen=True)
class Overlap:
    """Elements that a rank gets from a box. `begin` and `sizes` are in the whole tensor."""

    box: Box
    begin: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes in a buffer."""
        return rounded(prod(self.sizes) * getattr(torch, self.box.dtype).itemsize, UNIT)

    def inside(self, offset: Sequence[int]) -> tuple[slice, ...]:
        """Return the index of the elements in a box that begins at `offset` in the whole tensor."""
        return tuple(
            slice(begin - start, begin - start + size)
            for begin, start, size in zip(self.begin, offset, self.sizes, strict=True)
        )

    def pieces(self, most: int) -> Iterator[Overlap]:
        """Yield the elements in pieces of at most `most` bytes, by halving the first dimension that has several."""
        if self.nbytes <= most:
            yield self
            return
        dim = next(dim for dim, size in enumerate(self.sizes) if size > 1)
        half, size = self.sizes[dim] // 2, self.sizes[dim]
        for start, length in ((0, half), (half, size - half)):
            begin = [*self.begin[:dim], self.begin[dim] + start, *self.begin[dim + 1 :]]
            sizes = [*self.sizes[:dim], length, *self.sizes[dim + 1 :]]
            yield from replace(self, begin=tuple(begin), sizes=tuple(sizes)).pieces(most)


def fill(tensors: Mapping[str, Tensor], held: Held, mesh: Mesh, group: dist.ProcessGroup | None) -> None:
    """Fill this rank's parts of tensors from a checkpoint in memory, in place and bit for bit. Collective.

    Each element that a rank does not hold itself is sent to it once. `group` is a gloo group of all ranks, None for one
    rank. Raises ValueError on all ranks, before anything is written, if one of them would not get all elements.
    """
    parts = together(mesh, lambda: _checked(Parts(tensors), held))
    wanted = from_all(mesh, lambda: parts.offered)
    most = max(1 << 20, BUFFERS // mesh.world_size)
    sends = [list(_stream(wanted[target], held, mesh.rank, target, most)) for target in range(mesh.world_size)]
    own = parts.offered
    gets = [list(_stream(own, held, source, mesh.rank, most)) for source in range(mesh.world_size)]
    for each in sends[mesh.rank]:
        _put(parts, each, _elements(held, each))
    sends[mesh.rank], gets[mesh.rank] = [], []
    if group is None:
        return
    while True:
        leaving, coming = [_take(each, most) for each in sends], [_take(each, most) for each in gets]
        left = torch.tensor([any(leaving) or any(coming)], dtype=torch.int64)
        dist.all_reduce(left, dist.ReduceOp.MAX, group=group)
        if not left.item():
            return
        counts = [[sum(piece.nbytes for piece in each) for each in both] for both in (leaving, coming)]
        sent, got = (torch.empty(sum(each), dtype=torch.uint8) for each in counts)
        for piece, place in _places(leaving, sent):
            place.copy_(_elements(held, piece).reshape(-1).view(torch.uint8))
        dist.all_to_all_single(got, sent, counts[1], counts[0], group=group)
        for piece, place in _places(coming, got):
            _put(parts, piece, place.view(getattr(torch, piece.box.dtype)).view(piece.sizes))


def hand_over(shelf: Shelf, active: int) -> None:
    """Give records that only ranks >= `active` hold to ranks < `active`, into their shelves. Collective over the
    default process group of all ranks.

    The parts go to the receivers in turn. A rank adds a record to the file of its own place that has records of the
    same step, else to the file whose records are oldest. The givers keep theirs.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if active >= world:
        return
    own = dist.get_backend() != "gloo"  # the memory is on hosts
    group: Any = dist.new_group(backend="gloo") if own else dist.group.WORLD
    try:
        mine = {(record.name, record.rank): record for record in _records(shelf)}
        listed = [(asdict(name), part, len(record.whole)) for (name, part), record in mine.items()]
        known = [decode(each) for each in gather_bytes(encode(listed), group)]
        held = {(Name(**name), part) for each in known[:active] for name, part, _ in each}
        for giver in range(active, world):
            for name, part, length in known[giver]:
                key = Name(**name), part
                if key in held:
                    continue
                held.add(key)
                taker = part % active
                if rank == giver:
                    for chunk in mine[key].whole.split(BUFFERS):
                        dist.send(chunk, taker, group=group)
                elif rank == taker:
                    record = torch.empty(length, dtype=torch.uint8)
                    for chunk in record.split(BUFFERS):
                        dist.recv(chunk, giver, group=group)
                    _file_for(shelf, key[0].step).append(record)
    finally:
        if own:
            dist.destroy_process_group(group)


def _records(shelf: Shelf) -> list[KeptPart]:
    """Return the complete records of a shelf."""
    return [record for place in shelf.places for descriptor in place for record in File(descriptor).records()]


def _file_for(shelf: Shelf, step: int) -> File:
    """Return the file to which a record of another rank is added. Records of an older step in it are dropped."""
    files = [File(descriptor) for descriptor in shelf.places[0]]
    newest = [max((record.name.step for record in each.records()), default=-1) for each in files]
    if step in newest:
        return files[newest.index(step)]
    oldest = files[newest.index(min(newest))]
    if min(newest) < step:
        oldest.begin([])
    return oldest


def _checked(parts: Parts, held: Held) -> Parts:
    """Return the parts. Raises ValueError if a tensor differs from the stored one, or has elements in no box."""
    for key, (offset, sizes, described) in parts.offered.items():
        boxes = held.boxes.get(key, ())
        for box in boxes:
            if [list(box.shape), box.dtype] != [described["shape"], described["dtype"]]:
                raise ValueError(f"{key} is {described} here, but {box.dtype} of {list(box.shape)} there")
        covered = sum(prod(each.sizes) for box in boxes if (each := _overlap(box, offset, sizes)))
        if not boxes or covered != prod(sizes):
            raise ValueError(f"{key} has {covered:,} of {prod(sizes):,} elements there")
    return parts


def _overlap(box: Box, offset: Sequence[int], sizes: Sequence[int]) -> Overlap | None:
    begin = tuple(map(max, box.offset, offset))
    ends = [min(a + m, b + n) for a, m, b, n in zip(box.offset, box.sizes, offset, sizes, strict=True)]
    shared = tuple(end - start for start, end in zip(begin, ends, strict=True))
    return Overlap(box, begin, shared) if all(size > 0 for size in shared) else None


def _stream(wanted: Mapping[str, Offer], held: Held, source: int, target: int, most: int) -> Iterator[Overlap]:
    """Yield what one rank sends to another, in the order in which both know it."""
    for key, (offset, sizes, _) in sorted(wanted.items()):
        for box in held.boxes.get(key, ()):
            if held.source(box.rank, target) == source and (shared := _overlap(box, offset, sizes)):
                yield from shared.pieces(most)


def _take(stream: list[Overlap], most: int) -> list[Overlap]:
    """Remove and return the first pieces of a stream, of at most `most` bytes in total."""
    size = count = 0
    while count < len(stream) and size + stream[count].nbytes <= most:
        size, count = size + stream[count].nbytes, count + 1
    taken, stream[:count] = stream[:count], []
    return taken


def _places(pieces: Sequence[Sequence[Overlap]], buffer: Tensor) -> Iterator[tuple[Overlap, Tensor]]:
    """Yield each piece with its bytes in a buffer, without padding."""
    start = 0
    for piece in (piece for each in pieces for piece in each):
        size = prod(piece.sizes) * getattr(torch, piece.box.dtype).itemsize
        yield piece, buffer[start : start + size]
        start += piece.nbytes


def _elements(held: Held, piece: Overlap) -> Tensor:
    """Return the elements of a piece in this rank's memory."""
    return piece.box.view(held.mine[piece.box.rank].data)[piece.inside(piece.box.offset)]


def _put(parts: Parts, piece: Overlap, values: Tensor) -> None:
    """Copy the elements of a piece into this rank's tensor."""
    local, offset = parts.local[piece.box.key], parts.offers[piece.box.key].chunk.offsets
    local[piece.inside(offset)].copy_(values)
    changed(local)
