"""Copies of a rank's record on other nodes: the choice of partners, and the exchange between them in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import torch
import torch.distributed as dist
from torch import Tensor

from gptlite.satellites.elastic.parts import MAGIC, File, complete

CHUNK = 4 << 20  # bytes that are sent at a time


class Stopped(Exception):
    """Raised in the thread when the run has ended meanwhile, so that nothing more is written to the shelf."""


@dataclass
class Gate:
    """Permission to write to a shelf, which `close` takes from a thread that may still wait for another rank."""

    def __post_init__(self) -> None:
        self.lock, self.closed = Lock(), False

    def __enter__(self) -> None:
        self.lock.acquire()
        if self.closed:
            self.lock.release()
            raise Stopped

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def close(self) -> None:
        """Refuse further writes."""
        with self.lock:
            self.closed = True


def partner(nodes: Sequence[str], rank: int, number: int) -> int:
    """Return the rank that holds copy `number` (from 1) of a rank's part: on the node that many nodes further, the rank
    with the same place among its node's ranks. `nodes` has the node of each rank."""
    order = list(dict.fromkeys(nodes))
    places = {node: [other for other, held in enumerate(nodes) if held == node] for node in order}
    theirs = places[order[(order.index(nodes[rank]) + number) % len(order)]]
    return theirs[places[nodes[rank]].index(rank) % len(theirs)]


class Copies:
    """Exchange of records with the partners of this rank. `sources[i]` are the ranks whose copy i + 1 it holds."""

    def __init__(self, nodes: Sequence[str], rank: int, replicas: int, group: dist.ProcessGroup | None) -> None:
        numbers = range(1, min(replicas, len(set(nodes)) - 1) + 1)
        self.targets = [partner(nodes, rank, number) for number in numbers]
        self.sources = [
            [other for other in range(len(nodes)) if partner(nodes, other, number) == rank] for number in numbers
        ]
        self._group = group
        self._buffers = [torch.empty(CHUNK, dtype=torch.uint8) for _ in range(max(map(len, self.sources), default=0))]

    def swap(self, number: int, own: Tensor, file: File, gate: Gate) -> None:
        """Send the complete record `own`, uint8, to partner `number` (from 0), and receive theirs into a file.

        All ranks call it. Raises Stopped if the gate is closed meanwhile, RuntimeError if a rank is lost.
        """
        target, sources, group = self.targets[number], self.sources[number], self._group
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in sources]
        works = [dist.isend(torch.tensor([len(own)]), target, group=group, tag=number)]
        works += [dist.irecv(each, src, group=group, tag=number) for each, src in zip(lengths, sources, strict=True)]
        _wait(works)
        sizes = [int(each) for each in lengths]
        with gate:
            places = file.begin(sizes)
        for start in range(0, max([len(own), *sizes]), CHUNK):
            works = []
            if start < len(own):
                works.append(dist.isend(own[start : start + CHUNK], target, group=group, tag=number))
            coming = [i for i, size in enumerate(sizes) if start < size]
            for i in coming:
                # Not into the file: a rank that hangs may send the rest when the file holds something else.
                buffer = self._buffers[i][: sizes[i] - start]
                works.append(dist.irecv(buffer, sources[i], group=group, tag=number))
            _wait(works)
            with gate:
                for i in coming:
                    skipped = 0 if start else len(MAGIC)  # the record is not complete yet
                    size = min(CHUNK, sizes[i] - start)
                    places[i][start + skipped : start + size] = self._buffers[i][skipped:size]
        with gate:
            for place in places:
                complete(place)


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
