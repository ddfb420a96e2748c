"""Reduction of a layout to worlds of at most nine ranks. Does not import torch.

Each axis gets the degree 2, or 3 if its degree is odd. Where all axes together need more, several
worlds have some of the axes each, so that each pair of axes meets in one of them (a pairwise cover: Cohen et al. 1997,
"The AETG system", IEEE TSE 23(7)). Three ranks of one axis alone follow, where two have no stage between both ends of
the model, or no uneven shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import Layout, rule, stages_per_rank

MOST_RANKS = 9  # three axes of degree 2, or two of degree 3
TIMEOUT_SECONDS = 120.0  # of a collective between local ranks
DATA = ("replicate", "data", "context")  # axes among whose ranks the model state is sharded or copied


@dataclass(frozen=True)
class CutAxis:
    """Parallel axis of a layout. `true` is its degree there, `degree` the reduced one.

    `own` is False for experts that all data ranks together hold once: their axis then needs no ranks of its own.
    """

    name: str
    true: int
    degree: int
    own: bool = True


@dataclass(frozen=True)
class World:
    """Reduced layout in which the axes `names` are on, and all others have degree 1."""

    names: tuple[str, ...]
    parallelism: ParallelismConfig

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        layout = self.parallelism
        return layout.tensor * layout.pipeline * layout.context * (layout.data or 1)


def axes_of(config: ParallelismConfig, layout: Layout) -> tuple[CutAxis, ...]:
    """Return the axes of a layout whose degree is above 1."""
    data, copies = layout.data_size, config.dp_replicate if config.zero else 1
    degrees = {"pipeline": config.pipeline, "tensor": config.tensor, "context": config.context}
    degrees |= {"replicate": copies, "data": data // copies}
    cut = {name: 3 if degree % 2 else 2 for name, degree in degrees.items()}
    if config.expert > 1:
        cut["data"] = 3 if config.expert % 2 else 2  # which the experts' degree must divide
    axes = [CutAxis(name, degree, cut[name]) for name, degree in degrees.items() if degree > 1]
    if config.expert > 1:
        own = config.expert < data * config.context // copies
        axes.append(CutAxis("expert", config.expert, 3 if config.expert % 2 else 2, own))
    return tuple(axes)


def world_of(config: ParallelismConfig, axes: tuple[CutAxis, ...]) -> World:
    """Return the reduced layout with these axes. It may be illegal for the model."""
    degree = {axis.name: axis.degree for axis in axes}
    data = math.prod(degree.get(name, 1) for name in ("replicate", "data"))
    if expert := next((axis for axis in axes if axis.name == "expert"), None):
        data *= expert.degree if expert.own or not set(DATA) & degree.keys() else 1
    stages = stages_per_rank(config) if config.pipeline > 1 else None
    fixed = config.virtual_stages is None or rule(config).fixed
    return World(
        tuple(degree),
        replace(
            config,
            pipeline=degree.get("pipeline", 1),
            tensor=degree.get("tensor", 1),
            context=degree.get("context", 1),
            expert=degree.get("expert", 1),
            data=data,
            dp_replicate=degree.get("replicate", 1),
            sequence=config.sequence and "tensor" in degree,
            virtual_stages=config.virtual_stages if fixed else min(2, stages or 2),
            bucket_layers=min(2, config.bucket_layers),
            spread=False,
            timeout_seconds=TIMEOUT_SECONDS,
            # One node of all ranks, unless a node has fewer than all of them.
            zeropp=replace(config.zeropp, node_size=None),
        ),
    )


def cover(
    axes: tuple[CutAxis, ...], world: Callable[[tuple[CutAxis, ...]], World], legal: Callable[[World], bool]
) -> tuple[list[World], list[tuple[str, ...]]]:
    """Return worlds in which each pair of axes meets, the largest first, and the pairs (or single axes) that no legal
    world of at most MOST_RANKS ranks has."""
    candidates = [
        made
        for count in range(len(axes), 0, -1)
        for some in combinations(axes, count)
        if (made := world(some)).ranks <= MOST_RANKS and legal(made)
    ]
    wanted = {tuple(pair) for count in (1, 2) for pair in combinations([axis.name for axis in axes], count)}
    chosen: list[World] = []
    while wanted and candidates:
        best = max(candidates, key=lambda made: (len(wanted & _pairs(made)), -made.ranks, _shards(made)))
        if not wanted & _pairs(best):
            break
        chosen.append(best)
        wanted -= _pairs(best)
    chosen.sort(key=lambda made: (-len(made.names), not _shards(made)))
    lone = {pair[0] for pair in wanted if len(pair) == 1}
    return chosen, sorted(pair for pair in wanted if len(pair) == 1 or not lone & set(pair))


def thirds(config: ParallelismConfig, axes: tuple[CutAxis, ...], uneven: bool) -> list[World]:
    """Return worlds of three ranks along one axis: the pipeline, for a stage without either end of the model, and the
    data axis if two data ranks would have even shards, although the layout's are `uneven`."""
    true = {axis.name: axis.true for axis in axes if axis.degree == 2}
    wanted = ["pipeline"] if true.get("pipeline", 0) > 2 and stages_per_rank(config) == 1 else []
    wanted += ["data"] if uneven and true.get("data", 0) > 2 and config.expert == 1 else []
    return [world_of(config, (CutAxis(name, true[name], 3),)) for name in wanted]


def _pairs(world: World) -> set[tuple[str, ...]]:
    return {tuple(pair) for count in (1, 2) for pair in combinations(world.names, count)}


def _shards(world: World) -> bool:
    return bool(set(DATA) & set(world.names))
