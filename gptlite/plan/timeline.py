"""What each rank of a pipeline does when: the order of its passes, and when each runs, given how long they take.

The orders are those of torch.distributed.pipelining's schedules, which the engine runs (see parallelism/pipeline.py for
the papers). F is a forward pass, B a backward pass, I and W its halves where it is split: the gradients of the inputs,
which the rank before waits for, and those of the weights. A stage is a part of the model; a rank holds one or more.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import num_stages, rule, schedule_refuses, stages_of_rank

Turn = tuple[str, int]  # kind, stage
Pass = tuple[str, int, int]  # and micro-batch


class Event(NamedTuple):
    """One pass of a rank, in seconds from the beginning of the step."""

    rank: int
    stage: int
    micro_batch: int
    kind: str  # F, B, I or W
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The passes of a step, rank by rank, each rank's in the order it runs them."""

    events: list[Event]
    ranks: int

    @cached_property
    def seconds(self) -> float:
        """When the last rank is done."""
        return max(event.end for event in self.events)

    def of_rank(self, rank: int) -> list[Event]:
        """The passes of one rank."""
        return [event for event in self.events if event.rank == rank]

    def busy(self, rank: int) -> float:
        """Seconds in which a rank computes."""
        return sum(event.end - event.start for event in self.of_rank(rank))

    def bubble(self, rank: int) -> float:
        """Share of the step that a rank waits."""
        return 1 - self.busy(rank) / self.seconds if self.seconds else 0.0


def timeline(
    config: ParallelismConfig,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    message: float,
    weight_share: float = 0.5,
) -> Timeline:
    """When each pass of a step runs.

    `forward` and `backward` are the seconds of one micro-batch in each stage; `message` those of one activation, or its
    gradient, from rank to rank, during which both compute on. `weight_share` is the W half's part of `backward` where
    it is split. Raises ValueError for durations that are not one a stage, or micro-batches that the schedule refuses.
    """
    stages = num_stages(config)
    if len(forward) != stages or len(backward) != stages:
        raise ValueError(f"{len(forward)} and {len(backward)} durations for {stages} stages")
    orders = [order(config, rank, micro_batches) for rank in range(config.pipeline)]
    owner = {stage: rank for rank in range(config.pipeline) for stage in stages_of_rank(config, rank)}
    hops = [0.0 if owner[stage] == owner[stage + 1] else message for stage in range(stages - 1)]
    seconds = {
        "F": list(forward),
        "B": list(backward),
        # Nobody waits for the gradients of tokens: the first stage does all of it in its W half.
        "I": [0.0, *(each * (1 - weight_share) for each in backward[1:])],
        "W": [backward[0], *(each * weight_share for each in backward[1:])],
    }
    return Timeline(_run(orders, seconds, hops), config.pipeline)


def order(config: ParallelismConfig, rank: int, micro_batches: int) -> list[Pass]:
    """The passes of a pipeline rank, in the order it runs them. Raises ValueError for micro-batches it cannot run."""
    if reason := schedule_refuses(config, micro_batches):
        raise ValueError(reason)
    if config.pipeline == 1:
        kinds = [("F", 0), ("B", 0)] * micro_batches
    elif config.schedule in ("gpipe", "1f1b"):
        warmup = micro_batches if config.schedule == "gpipe" else config.pipeline - rank
        kinds = _alternate([("F", rank)] * micro_batches, [("B", rank)] * micro_batches, warmup)
    elif rule(config).v_shape:
        kinds = _v(config.pipeline, rank, micro_batches)
    else:
        kinds = _interleaved(config, rank, micro_batches)
    return _numbered(kinds, micro_batches)


def _numbered(kinds: Iterable[tuple[str, int]], micro_batches: int) -> list[Pass]:
    """Each kind of pass takes a stage's micro-batches in order; what is too much for them is left out."""
    counts: dict[tuple[str, int], int] = defaultdict(int)
    passes = []
    for kind, stage in kinds:
        number = counts[kind, stage]
        counts[kind, stage] += 1
        if number < micro_batches:
            passes.append((kind, stage, number))
    return passes


def _alternate(forward: list[Turn], backward: list[Turn], warmup: int) -> list[Turn]:
    """`warmup` forward passes, then a backward and a forward one in turn, then the other backward ones."""
    both = [turn for pair in zip(backward, forward[warmup:], strict=False) for turn in pair]
    return [*forward[:warmup], *both, *backward[len(forward[warmup:]) :]]


def _interleaved(config: ParallelismConfig, rank: int, micro_batches: int) -> list[Turn]:
    """In rounds of about as many micro-batches as there are ranks: a stage takes a whole round, then the next does."""
    ranks, mine = config.pipeline, stages_of_rank(config, rank)
    rounds = max(1, micro_batches // ranks)
    each = micro_batches // rounds
    split = rule(config).splits_backward
    forward = [("F", stage) for _ in range(rounds) for stage in mine for _ in range(each)]
    back = [stage for _ in range(rounds) for stage in reversed(mine) for _ in range(each)]
    # One step further from the end costs a forward pass more, and a backward pass where the halves are not split.
    warmup = min((len(mine) - 1) * each + (1 if split else 2) * (ranks - 1 - rank), len(forward))
    if not split:
        # The forward pass comes first in each turn: as if the warm-up were one longer.
        return _alternate(forward, [("B", stage) for stage in back], warmup + 1)
    turns = _alternate(forward, [("I", stage) for stage in back], warmup + 1)
    weights = iter([("W", stage) for stage in back])
    inputs, filled = 0, []
    for turn in turns:
        filled.append(turn)
        inputs += turn[0] == "I"
        if turn[0] == "I" and inputs > rank:
            filled.append(next(weights))
    return [*filled, *weights]


def _v(ranks: int, rank: int, micro_batches: int) -> list[Turn]:
    """ZBV (Qi et al. 2024, arXiv:2405.15362): a rank holds a stage on the way down and its mirror on the way up."""
    down, up = rank, 2 * ranks - 1 - rank
    count = max(2 * ranks - 1, micro_batches)  # the shape needs so many; those that are not there are left out
    both = {stage: [("I", stage), ("W", stage)] for stage in (down, up)}
    turns = [("F", down)] * (2 * (ranks - rank) - 1)
    turns += [("F", up), ("F", down)] * rank
    turns += [("F", up), *both[up]] * (ranks - rank)
    left = count - (2 * ranks - 1 - rank)  # forward passes still to come on the way down
    turns += [("F", down), *both[down], ("F", up), *both[up]] * left
    turns += [*both[down], ("F", up), *both[up]] * (count - ranks - left)
    turns += [("I", down), ("I", up)] * rank
    turns += both[down] * (ranks - rank)
    return turns + [("W", up)] * rank + [("W", down)] * rank


def _run(orders: list[list[Pass]], seconds: dict[str, list[float]], hops: list[float]) -> list[Event]:
    """Each rank runs its passes in order, each as soon as what it is given has arrived."""
    ends: dict[Pass, float] = {}  # of I under B
    events: list[list[Event]] = [[] for _ in orders]
    clocks, queues = [0.0] * len(orders), [deque(passes) for passes in orders]
    sweep = list(range(len(orders)))
    while any(queues):
        for rank in sweep:
            while queues[rank]:
                kind, stage, number = queues[rank][0]
                given, hop = 0.0, 0.0
                if kind == "F" and stage > 0:
                    given, hop = ends.get(("F", stage - 1, number), -1.0), hops[stage - 1]
                elif kind in "BI" and stage < len(hops):
                    given, hop = ends.get(("B", stage + 1, number), -1.0), hops[stage]
                if given < 0:
                    break
                start = max(clocks[rank], given + hop)
                clocks[rank] = end = start + seconds[kind][stage]
                if kind != "W":
                    ends["F" if kind == "F" else "B", stage, number] = end
                events[rank].append(Event(rank, stage, number, kind, start, end))
                queues[rank].popleft()
        sweep.reverse()  # forward passes go up the ranks, backward passes down
    return list(chain.from_iterable(events))


def pipeline_seconds(
    config: ParallelismConfig,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    busy: Sequence[float],
    message: float,
) -> float:
    """Seconds of all passes of a step in closed form, for a search that asks too often to lay out every pass.

    `forward` and `backward`: of one micro-batch in each stage; `busy`: in all stages of each rank; `message`: of one
    activation from rank to rank.

    The slowest rank is busy with its passes; before its first and after its last one, the others fill and drain.
    """
    ranks, stages = config.pipeline, len(forward)
    slowest, hop = max(busy), 2 * message
    if ranks == 1:
        return micro_batches * slowest
    if config.schedule == "gpipe":
        whole = sum(forward) + sum(backward) + (ranks - 1) * hop
        return whole + (micro_batches - 1) * (max(forward) + max(backward))
    others = (sum(busy) - slowest) * ranks / stages  # one stage of each other rank
    if config.schedule == "1f1b":
        # The first rank has as many micro-batches on their way to the end and back as there are ranks.
        there_and_back = (sum(busy) + (ranks - 1) * hop) / ranks
        return micro_batches * max(slowest, there_and_back) + others + (ranks - 2) * hop
    busiest = micro_batches * slowest
    if not rule(config).splits_backward:
        return busiest + others + (stages - 1) * hop
    # A third of a stage's work remains, that a W pass of its own cannot fill, and messages as timelines show them.
    if not rule(config).v_shape:
        return busiest + others / 3 + ((stages + 3 * ranks) / 2 - 2) * hop
    unfilled = max(0, 2 * ranks - 1 - micro_batches) / (ranks - 1)
    return busiest + others / 3 * (1 + unfilled) + (2.5 * ranks - 3.5) * hop
