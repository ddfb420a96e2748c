"""Execution order of a pipeline rank's passes, and quantities derived from it for memory and traffic.

All of them depend only on the schedule, its stages and the number of micro-batches. Computing an order takes longer
than the rest of an estimate, so bounded caches share it among layouts with the same schedule.
"""

from __future__ import annotations

from array import array

from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import stages_of_rank, stages_per_rank
from gptlite.plan.cache import cached
from gptlite.plan.timeline import order

# A pass: the index of its stage among the rank's, its kind, and whether it is the step's first forward pass of the
# stage, or the first or the last that computes gradients of its weights.
Turn = tuple[int, str, bool, bool]
Places = tuple[int, ...]  # indices of stages among the rank's


def pipeline_key(config: ParallelismConfig, *rest: int) -> tuple[object, ...]:
    """Return the fields that an order depends on, and `rest`: the rank and the number of micro-batches."""
    return config.schedule, config.pipeline, stages_per_rank(config), *rest


@cached(pipeline_key, most=1024)  # an entry takes 1 to 100 kB
def turns(config: ParallelismConfig, rank: int, micro_batches: int) -> tuple[list[Turn], array[int]]:
    """Return the passes of a rank: the distinct ones, and the order of all as indices of these."""
    places = {stage: place for place, stage in enumerate(stages_of_rank(config, rank))}
    known, numbers, last = dict[Turn, int](), array("H"), micro_batches - 1
    for kind, stage, number in order(config, rank, micro_batches):
        turn = places[stage], kind, number == 0 and kind != "I", number == last and kind in "BW"
        numbers.append(known.setdefault(turn, len(known)))
    return list(known), numbers


@cached(pipeline_key)
def states(
    config: ParallelismConfig, rank: int, micro_batches: int, frees: bool
) -> list[tuple[Places, Places, Places]]:
    """Return the states of a rank at its backward passes, each combination once: the stages with gathered parameters,
    those with gradients of some micro-batches, and those with gradients of all.

    `frees`: ZeRO 3, whose passes free the parameters that they gathered.
    """
    found = dict[tuple[int, int, int], None]()  # an ordered set of bit masks, a bit for each stage
    gathered = reduced = done = 0
    different, numbers = turns(config, rank, micro_batches)
    for place, kind, first, last in map(different.__getitem__, numbers):
        bit, is_first = 1 << place, place == rank == 0
        # Tokens need no gradient, so the first stage's W half is its whole backward pass.
        if kind == "I" and is_first:
            continue
        if kind == "F" or (frees and (kind != "W" or is_first)):
            gathered |= bit
        if kind == "F":
            continue
        found[gathered, reduced, done] = None
        if last:
            reduced, done = reduced & ~bit, done | bit
        elif first:
            reduced |= bit
        if frees or last:
            gathered &= ~bit
    places = range(stages_per_rank(config))
    held = {bits: tuple(place for place in places if bits >> place & 1) for each in found for bits in each}
    return [(held[gathered], held[reduced], held[done]) for gathered, reduced, done in found]


@cached(pipeline_key)
def gathers(config: ParallelismConfig, rank: int, micro_batches: int) -> dict[tuple[int, bool], tuple[int, int]]:
    """Return the number of ZeRO-3 gathers, forward and backward, of each stage of a rank: of its blocks (True), freed
    after each pass, and of its other parameters (False), which stay from a forward pass to the end of the next backward
    one."""
    kinds: dict[int, list[str]] = {stage: [] for stage in stages_of_rank(config, rank)}
    for kind, stage, _ in order(config, rank, micro_batches):
        if kind != "I" or stage > 0:  # the first stage's I pass is empty, as tokens need no gradient
            kinds[stage].append(kind)
    counts = {}
    for stage, passes in kinds.items():
        fresh = [kind for before, kind in zip(["B", *passes], passes, strict=False) if before != "F"]
        for block, gathering in ((True, passes), (False, fresh)):
            forward = gathering.count("F")
            counts[stage, block] = forward, len(gathering) - forward
    return counts
