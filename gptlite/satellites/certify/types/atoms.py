"""Axes of a layout as products of common factors of the world, and process groups as sets of these factors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch.distributed as dist

from gptlite.errors import ConfigError
from gptlite.parallelism.axes import AXES, CONTEXT, EXPERT, EXPERT_DATA_AXES
from gptlite.parallelism.layout import Layout


@dataclass(frozen=True)
class Atoms:
    """Factors of a world of ranks. Atom i has `sizes[i]` ranks, `strides[i]` apart; the fastest comes first."""

    layout: Layout
    strides: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout) -> Atoms:
        """Return the atoms of a layout. Raises ConfigError if two folded axes have no common factors."""
        borders = {1, layout.world_size}
        for axis in (*AXES, CONTEXT, EXPERT, *EXPERT_DATA_AXES):
            if layout.size(axis) > 1:
                borders |= {layout.stride(axis), layout.stride(axis) * layout.size(axis)}
        steps = sorted(borders)
        pairs = list(pairwise(steps))
        if any(after % before for before, after in pairs):
            raise ConfigError(
                f"parallelism.context={layout.context} and parallelism.expert={layout.size(EXPERT)} have groups that "
                "are not nested, which types cannot describe; let one degree divide the other"
            )
        return cls(layout, tuple(a for a, _ in pairs), tuple(b // a for a, b in pairs))

    @cached_property
    def world(self) -> int:
        """All atoms."""
        return (1 << len(self.sizes)) - 1

    def along(self, *axes: str) -> int:
        """Return the atoms of some axes together."""
        out = 0
        for axis in axes:
            begin = self.layout.stride(axis)
            end = begin * self.layout.size(axis)
            for i, stride in enumerate(self.strides):
                out |= (begin <= stride < end) << i
        return out

    def of_ranks(self, ranks: Iterable[int]) -> int | None:
        """Return the atoms along which some ranks lie; None if they are not all ranks along them."""
        numbers = sorted(ranks)
        out, count = 0, 1
        for i, (stride, size) in enumerate(zip(self.strides, self.sizes, strict=True)):
            if len({rank // stride % size for rank in numbers}) > 1:
                out |= 1 << i
                count *= size
        return out if count == len(numbers) else None

    def of_group(self, group: dist.ProcessGroup) -> int | None:
        """Return the atoms along which a process group lies; None if it lacks ranks."""
        return self.of_ranks(dist.get_process_group_ranks(group))

    def last_along(self, rank: int, atom: int) -> int:
        """Return the rank that differs from `rank` in being the last along an atom."""
        stride, size = self.strides[atom], self.sizes[atom]
        return rank + (size - 1 - rank // stride % size) * stride

    def words(self, atoms: int | None) -> str:
        """Return the names of the axes that some atoms make up, such as `tp` or `dp_shard x tp`."""
        if atoms is None:
            return "ranks that are no axis"
        names, left = [], atoms
        axes = (*AXES, CONTEXT, EXPERT, *EXPERT_DATA_AXES)
        if atoms == self.world and atoms not in map(self.along, axes):
            return "the world"
        for axis in sorted(axes, key=self.layout.size, reverse=True):
            mine = self.along(axis)
            if mine and not mine & ~left:
                names.append(axis)
                left &= ~mine
        for i in range(len(self.sizes)):
            if left >> i & 1:
                inside = [axis for axis in axes if self.along(axis) >> i & 1]
                names.append(f"part of {inside[0] if inside else 'the world'}")
        return " x ".join(dict.fromkeys(names))
