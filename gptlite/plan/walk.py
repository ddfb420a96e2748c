"""The order of a pipeline rank's passes, in the two forms that its memory needs.

Both follow from the schedule, its stages and the number of micro-batches alone. Laying out an order takes longer than
all the rest of an estimate, so bounded caches keep both forms for the layouts that share a schedule.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache

from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import stages_of_rank, stages_per_rank
from gptlite.plan.timeline import order

# Kinds of passes that memory tells apart. `first` and `last` are a stage's first and last ones of a step; with a single
# micro-batch a backward pass is an `only` one.
NAMES = ("first F", "F", "I", *(f"{when}{kind}" for kind in "BW" for when in ("first ", "", "last ", "only ")))
PLACE = {name: place for place, name in enumerate(NAMES)}
KEPT = 1024  # orders, of 1 to 100 kB as codes


@dataclass(frozen=True)
class Held:
    """What a rank has at the beginning of a backward pass. All numbers are places among the rank's stages.

    `gathered`: the stages whose parameters are there; `reduced`: those with gradients of some micro-batches; `done`:
    those with the gradients of all.
    """

    gathered: tuple[int, ...]
    reduced: tuple[int, ...]
    done: tuple[int, ...]


def codes(config: ParallelismConfig, rank: int, micro_batches: int) -> array[int]:
    """The passes of a rank in their order, each as place of its stage * len(NAMES) + PLACE of its name."""
    return _codes(*_key(config), rank, micro_batches)


def states(config: ParallelismConfig, rank: int, micro_batches: int, frees: bool) -> tuple[Held, ...]:
    """What a rank has at its backward passes, each combination once. `frees`: ZeRO 3, where a pass frees what it has
    gathered."""
    return _states(*_key(config), rank, micro_batches, frees)


def _key(config: ParallelismConfig) -> tuple[str, int, int]:
    """What an order depends on."""
    return config.schedule, config.pipeline, stages_per_rank(config)


@lru_cache(maxsize=KEPT)
def _codes(schedule: str, pipeline: int, virtual: int, rank: int, micro_batches: int) -> array[int]:
    config = ParallelismConfig(pipeline=pipeline, schedule=schedule, virtual_stages=virtual)
    starts = {stage: place * len(NAMES) for place, stage in enumerate(stages_of_rank(config, rank))}
    when = dict.fromkeys(range(micro_batches), "") | {micro_batches - 1: "last ", 0: "first "}
    if micro_batches == 1:
        when[0] = "only "
    names = {(kind, number): PLACE[when[number] + kind] for kind in "BW" for number in range(micro_batches)}
    names |= {("F", number): PLACE["F" if number else "first F"] for number in range(micro_batches)}
    names |= {("I", number): PLACE["I"] for number in range(micro_batches)}
    passes = order(config, rank, micro_batches)
    return array("H", [starts[stage] + names[kind, number] for kind, stage, number in passes])


@lru_cache(maxsize=4 * KEPT)
def _states(schedule: str, pipeline: int, virtual: int, rank: int, micro_batches: int, frees: bool) -> tuple[Held, ...]:
    gathered, reduced, done = set[int](), set[int](), set[int]()
    found, changed = dict[Held, None](), True  # a set that keeps the order
    for code in _codes(schedule, pipeline, virtual, rank, micro_batches):
        place, name = divmod(code, len(NAMES))
        when, _, kind = NAMES[name].rpartition(" ")
        if kind == "F":
            changed = changed or place not in gathered
            gathered.add(place)
            continue
        # Nobody wants the gradient of tokens: of a split backward pass of the first stage the W half is all.
        is_first = place == rank == 0
        if kind == "I" and is_first:
            continue
        if frees and (kind != "W" or is_first) and place not in gathered:
            gathered.add(place)
            changed = True
        if changed:
            found[Held(tuple(sorted(gathered)), tuple(sorted(reduced)), tuple(sorted(done)))] = None
        changed = when != "" or frees
        if when == "first":
            reduced.add(place)
        if when in ("last", "only"):
            reduced.discard(place)
            done.add(place)
        if frees or when in ("last", "only"):
            gathered.discard(place)
    return tuple(found)
