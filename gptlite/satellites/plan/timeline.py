"""Timeline of a pipeline: the order of each rank's passes, and their start and end for given durations.

The orders are those of torch.distributed.pipelining's schedules, which the engine runs (see parallelism/pipeline.py for
the papers). F is a forward pass and B a backward pass. Some schedules split B: I computes the gradients of the inputs,
which the previous stage needs, and W those of the weights. A stage is a part of the model; a rank holds one or more.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import num_stages, rule, schedule_refuses, stages_of_rank, stages_per_rank

Turn = tuple[str, int]  # kind, stage
Pass = tuple[str, int, int]  # kind, stage, micro-batch


class TimedPass(NamedTuple):
    """One pass of a rank. `start` and `end` are in seconds from the beginning of the step."""

    rank: int
    stage: int
    micro_batch: int
    kind: str  # F, B, I or W
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Passes of a step, grouped by rank and in the execution order of each rank."""

    events: list[TimedPass]
    ranks: int

    @cached_property
    def seconds(self) -> float:
        """Time at which the last rank finishes."""
        return max(event.end for event in self.events)

    def of_rank(self, rank: int) -> list[TimedPass]:
        """Return the passes of one rank."""
        return [event for event in self.events if event.rank == rank]

    def busy(self, rank: int) -> float:
        """Return the seconds during which a rank computes."""
        return sum(event.end - event.start for event in self.of_rank(rank))

    def bubble(self, rank: int) -> float:
        """Return the share of the step's time during which a rank is idle."""
        return 1 - self.busy(rank) / self.seconds if self.seconds else 0.0


def timeline(
    config: ParallelismConfig,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    message: float,
    weight_share: float = 0.5,
) -> Timeline:
    """Return the start and end of each pass of a step.

    `forward` and `backward` are the seconds of one micro-batch in each stage. `message` is the seconds to send one
    activation, or its gradient, to another rank, overlapped with compute on both. `weight_share` is the W half's share
    of `backward` if it is split. Raises ValueError unless there is one duration per stage, or if the schedule cannot
    run that number of micro-batches.
    """
    stages = num_stages(config)
    if len(forward) != stages or len(backward) != stages:
        raise ValueError(f"{len(forward)} forward and {len(backward)} backward durations for {stages} stages")
    orders = [order(config, rank, micro_batches) for rank in range(config.pipeline)]
    owner = {stage: rank for rank in range(config.pipeline) for stage in stages_of_rank(config, rank)}
    hops = [0.0 if owner[stage] == owner[stage + 1] else message for stage in range(stages - 1)]
    seconds = {
        "F": list(forward),
        "B": list(backward),
        # Tokens need no gradient, so the first stage's W half is its whole backward pass.
        "I": [0.0, *(each * (1 - weight_share) for each in backward[1:])],
        "W": [backward[0], *(each * weight_share for each in backward[1:])],
    }
    return Timeline(_run(orders, seconds, hops), config.pipeline)


def order(config: ParallelismConfig, rank: int, micro_batches: int) -> list[Pass]:
    """Return the passes of a pipeline rank in execution order. Raises ValueError if the schedule cannot run that number
    of micro-batches."""
    if reason := schedule_refuses(config, micro_batches):
        raise ValueError(reason)
    if config.pipeline == 1:
        kinds = [("F", 0), ("B", 0)] * micro_batches
    elif config.schedule in ("gpipe", "1f1b"):
        ahead = warmup(config, rank, micro_batches)
        kinds = _alternate([("F", rank)] * micro_batches, [("B", rank)] * micro_batches, ahead)
    elif rule(config).v_shape:
        kinds = _v(config.pipeline, rank, micro_batches)
    else:
        kinds = _interleaved(config, rank, micro_batches)
    return _numbered(kinds, micro_batches)


def warmup(config: ParallelismConfig, rank: int, micro_batches: int) -> int:
    """Return the number of forward passes of single stages that a rank runs before its first backward pass, in any
    schedule that is not V-shaped."""
    if config.pipeline == 1 or config.schedule == "gpipe":
        return micro_batches if config.pipeline > 1 else 1
    stages, each = stages_per_rank(config), micro_batches // max(1, micro_batches // config.pipeline)
    # Each later rank adds one forward pass, or two if the schedule is interleaved and does not split backward passes.
    distance = 1 if rule(config).splits_backward or config.schedule == "1f1b" else 2
    ahead = (stages - 1) * each + distance * (config.pipeline - 1 - rank)
    return min(ahead + 1, stages * micro_batches)


def _numbered(kinds: Iterable[tuple[str, int]], micro_batches: int) -> list[Pass]:
    """Number the micro-batches of each kind of pass and stage in order, and drop passes beyond `micro_batches`."""
    counts: dict[tuple[str, int], int] = defaultdict(int)
    passes = []
    for kind, stage in kinds:
        number = counts[kind, stage]
        counts[kind, stage] += 1
        if number < micro_batches:
            passes.append((kind, stage, number))
    return passes


def _alternate(forward: list[Turn], backward: list[Turn], warmup: int) -> list[Turn]:
    """Return `warmup` forward passes, then backward and forward passes in turn, then the remaining backward ones."""
    both = [turn for pair in zip(backward, forward[warmup:], strict=False) for turn in pair]
    return [*forward[:warmup], *both, *backward[len(forward[warmup:]) :]]


def _interleaved(config: ParallelismConfig, rank: int, micro_batches: int) -> list[Turn]:
    """Return the turns of an interleaved schedule. It runs in rounds of about as many micro-batches as ranks; each of a
    rank's stages runs a whole round before the next stage starts it."""
    ranks, mine = config.pipeline, stages_of_rank(config, rank)
    rounds = max(1, micro_batches // ranks)
    each = micro_batches // rounds
    forward = [("F", stage) for _ in range(rounds) for stage in mine for _ in range(each)]
    back = [stage for _ in range(rounds) for stage in reversed(mine) for _ in range(each)]
    kind = "I" if rule(config).splits_backward else "B"
    turns = _alternate(forward, [(kind, stage) for stage in back], warmup(config, rank, micro_batches))
    if kind == "B":
        return turns
    # A W pass follows each I pass but the first `rank` ones; the remaining W passes run at the end.
    weights = iter([("W", stage) for stage in back])
    inputs, filled = 0, []
    for turn in turns:
        filled.append(turn)
        inputs += turn[0] == "I"
        if turn[0] == "I" and inputs > rank:
            filled.append(next(weights))
    return [*filled, *weights]


def _v(ranks: int, rank: int, micro_batches: int) -> list[Turn]:
    """Return the turns of ZBV (Qi et al. 2024, arXiv:2405.15362). A rank holds two stages: `down`, on the way from the
    first rank to the last, and `up`, on the way back."""
    down, up = rank, 2 * ranks - 1 - rank
    count = max(2 * ranks - 1, micro_batches)  # the V shape needs this minimum; `_numbered` drops extra passes
    both = {stage: [("I", stage), ("W", stage)] for stage in (down, up)}
    turns = [("F", down)] * (2 * (ranks - rank) - 1)
    turns += [("F", up), ("F", down)] * rank
    turns += [("F", up), *both[up]] * (ranks - rank)
    left = count - (2 * ranks - 1 - rank)  # remaining forward passes of the stage `down`
    turns += [("F", down), *both[down], ("F", up), *both[up]] * left
    turns += [*both[down], ("F", up), *both[up]] * (count - ranks - left)
    turns += [("I", down), ("I", up)] * rank
    turns += both[down] * (ranks - rank)
    return turns + [("W", up)] * rank + [("W", down)] * rank


def _run(orders: list[list[Pass]], seconds: dict[str, list[float]], hops: list[float]) -> list[TimedPass]:
    """Simulate the ranks, which start each pass as soon as the previous one has ended and its input has arrived.

    `seconds`: duration of each kind of pass in each stage. `hops`: seconds of a message from each stage to the next.
    """
    ends: dict[Pass, float] = {}  # an I pass is stored as B: the previous stage waits for either
    events: list[list[TimedPass]] = [[] for _ in orders]
    clocks, queues = [0.0] * len(orders), [deque(passes) for passes in orders]
    sweep = list(range(len(orders)))
    while any(queues):
        for rank in sweep:
            while queues[rank]:
                kind, stage, number = queues[rank][0]
                produced, hop = 0.0, 0.0
                if kind == "F" and stage > 0:
                    produced, hop = ends.get(("F", stage - 1, number), -1.0), hops[stage - 1]
                elif kind in "BI" and stage < len(hops):
                    produced, hop = ends.get(("B", stage + 1, number), -1.0), hops[stage]
                if produced < 0:  # the pass that produces the input has not run yet
                    break
                start = max(clocks[rank], produced + hop)
                clocks[rank] = end = start + seconds[kind][stage]
                if kind != "W":
                    ends["F" if kind == "F" else "B", stage, number] = end
                events[rank].append(TimedPass(rank, stage, number, kind, start, end))
                queues[rank].popleft()
        sweep.reverse()  # inputs of forward passes come from lower ranks, those of backward passes from higher ones
    return list(chain.from_iterable(events))


def pipeline_seconds(
    config: ParallelismConfig,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    busy: Sequence[float],
    message: float,
) -> float:
    """Return the seconds of all passes of a step in closed form, because full timelines are too slow for a search.

    All durations are for one micro-batch, in seconds: `forward` and `backward` of each stage, `busy` of all stages of
    each rank together, `message` of sending one activation to another rank.

    The slowest rank computes without a pause; the other ranks fill the pipeline before its first pass and drain it
    after its last.
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
        # The first rank has as many micro-batches in flight as there are ranks.
        there_and_back = (sum(busy) + (ranks - 1) * hop) / ranks
        return micro_batches * max(slowest, there_and_back) + others + (ranks - 2) * hop
    busiest = micro_batches * slowest
    if not rule(config).splits_backward:
        return busiest + others + (stages - 1) * hop
    # W passes fill about two thirds of the bubble. The factors of `hop` match those of timelines.
    if not rule(config).v_shape:
        return busiest + others / 3 + ((stages + 3 * ranks) / 2 - 2) * hop
    unfilled = max(0, 2 * ranks - 1 - micro_batches) / (ranks - 1)
    return busiest + others / 3 * (1 + unfilled) + (2.5 * ranks - 3.5) * hop
