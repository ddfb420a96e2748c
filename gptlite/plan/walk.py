"""The order of a pipeline rank's passes, and what follows from it, as its memory and its traffic need it.

All of it follows from the schedule, its stages and the number of micro-batches alone. Laying out an order takes longer
than all the rest of an estimate, so bounded caches keep it for the layouts that share a schedule.
"""

from __future__ import annotations

from array import array

from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import stages_of_rank, stages_per_rank
from gptlite.plan.cache import cached
from gptlite.plan.timeline import order

# A pass: the place of its stage among the rank's, its kind, and whether it is the step's first forward pass of the
# stage, or the first or the last that makes gradients of its weights.
Turn = tuple[int, str, bool, bool]
Places = tuple[int, ...]  # of stages among the rank's


def pipeline_key(config: ParallelismConfig, *rest: int) -> tuple[object, ...]:
    """What an order depends on, beside `rest`: the rank and the number of micro-batches."""
    return config.schedule, config.pipeline, stages_per_rank(config), *rest


@cached(pipeline_key, most=1024)  # of 1 to 100 kB
def turns(config: ParallelismConfig, rank: int, micro_batches: int) -> tuple[list[Turn], array[int]]:
    """The passes of a rank: those that differ, and all in their order as numbers of these."""
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
    """What a rank has at its backward passes, each combination once: the stages whose parameters are gathered, those
    with gradients of some micro-batches, and those with the gradients of all.

    `frees`: ZeRO 3, where a pass frees what it has gathered.
    """
    found = dict[tuple[int, int, int], None]()  # a set that keeps the order, of numbers with a bit for each stage
    gathered = reduced = done = 0
    different, numbers = turns(config, rank, micro_batches)
    for place, kind, first, last in map(different.__getitem__, numbers):
        bit, is_first = 1 << place, place == rank == 0
        # Nobody wants the gradient of tokens: of a split backward pass of the first stage the W half is all.
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
    """How often each stage of a rank gathers with ZeRO 3, forward and backward: its blocks (True), freed after each
    pass, and its other parameters (False), which stay from a forward pass to the end of the next backward one."""
    kinds: dict[int, list[str]] = {stage: [] for stage in stages_of_rank(config, rank)}
    for kind, stage, _ in order(config, rank, micro_batches):
        if kind != "I" or stage > 0:  # nothing to compute: nobody wants the gradient of tokens
            kinds[stage].append(kind)
    counts = {}
    for stage, passes in kinds.items():
        fresh = [kind for before, kind in zip(["B", *passes], passes, strict=False) if before != "F"]
        for block, gathering in ((True, passes), (False, fresh)):
            forward = gathering.count("F")
            counts[stage, block] = forward, len(gathering) - forward
    return counts
