"""Distinct passes of a pipeline rank and their order, for the estimates of memory and traffic.

Both depend only on the schedule, its stages and the number of micro-batches. Computing the order takes longer than the
rest of an estimate, so a bounded cache shares it among layouts with the same schedule.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import stages_of_rank, stages_per_rank
from gptlite.satellites.plan.cache import cached
from gptlite.satellites.plan.timeline import order

Order = np.ndarray[Any, np.dtype[np.uint16]]


class Turn(NamedTuple):
    """A pass of one stage of a rank. `place` is the stage's index among the rank's stages.

    `kind` is F (forward), B (backward), or I or W (the half of a split backward pass for the gradients of the inputs or
    weights). `first`: the first forward pass of the stage in the step, or the first pass that computes weight
    gradients. `last`: the last pass that computes weight gradients. `fresh`: the stage's previous pass was not a
    forward pass, so parameters that stay gathered from a forward pass to the next backward pass have to be gathered.
    """

    place: int
    kind: str
    first: bool
    last: bool
    fresh: bool


def pipeline_key(config: ParallelismConfig, *rest: int) -> tuple[object, ...]:
    """Return the fields that the order of passes depends on, followed by `rest`: the rank and the micro-batches."""
    return config.schedule, config.pipeline, stages_per_rank(config), *rest


@cached(pipeline_key, most=1024)  # an entry takes 1 to 100 kB
def turns(config: ParallelismConfig, rank: int, micro_batches: int) -> tuple[list[Turn], Order]:
    """Return the distinct passes of a rank, and the order of all passes as indices into them.

    The first stage's I passes are omitted: they are empty, as tokens need no gradient.
    """
    mine = stages_of_rank(config, rank)
    places, before = {stage: place for place, stage in enumerate(mine)}, dict.fromkeys(mine, "B")
    known, numbers = dict[tuple[int, str, bool, bool, bool], int](), list[int]()
    for kind, stage, number in order(config, rank, micro_batches):
        if kind == "I" and stage == 0:
            continue
        ends = number == 0 and kind != "I", number == micro_batches - 1 and kind in "BW"
        turn = places[stage], kind, *ends, before[stage] != "F"
        numbers.append(known.setdefault(turn, len(known)))
        before[stage] = kind
    # Memory is summed over thousands of passes with NumPy, by these indices.
    return [Turn(*turn) for turn in known], np.array(numbers, np.uint16)


@cached(pipeline_key)
def gathers(config: ParallelismConfig, rank: int, micro_batches: int) -> Counter[tuple[int, bool, str]]:
    """Return the number of ZeRO-3 gathers on a rank. A key is the stage's place, True for its blocks or False for its
    other parameters, and the phase."""
    counts = Counter[tuple[int, bool, str]]()
    different, numbers = turns(config, rank, micro_batches)
    for turn, times in zip(different, np.bincount(numbers).tolist(), strict=True):
        phase = "forward" if turn.kind == "F" else "backward"
        counts[turn.place, True, phase] += times
        counts[turn.place, False, phase] += times * turn.fresh
    return counts
