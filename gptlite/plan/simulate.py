"""One rank of any world, simulated on a CPU without its devices: memory over time, transfers, FLOPs of a step.

The engine's own model, layout, optimizer, schedule and step run with tensors that hold no data and ranks that are
imagined, so what they do is what a real rank would do. With many micro-batches, the first ones are run and the rest are
more of the same: see `simulate`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from gptlite.parallelism.layout import rule
from gptlite.plan.workload import RankBytes, Transfer, Workload

if TYPE_CHECKING:
    from gptlite.ops.select import Ops


@dataclass(frozen=True)
class Simulation:
    """A step of one rank.

    peak: model state when it is most, and the most that activations (all else) take, whenever that is; at_once: the
    instant with the largest total. history: the fullest instant of each phase, of a pass `F 3 7` (stage 3, micro-batch
    7); of the last micro-batches simulated where not all were. simulated: how many were, of the step's.
    """

    peak: RankBytes
    at_once: RankBytes
    history: list[tuple[str, RankBytes]]
    transfers: list[Transfer]
    flops: int
    simulated: int


def simulate(work: Workload, rank: int, *, compile: bool = False, ops: Ops | None = None) -> Simulation:
    """What a rank of the workload's world does in a step. To be called in a process that has joined no other ranks.

    Where there are more micro-batches than show what one more adds, two numbers of them are simulated, and the
    difference is added for each of the others: once a pipeline is full, a further micro-batch adds the same transfers,
    FLOPs and bytes (of its activations in GPipe, of buffers to receive it in any). `ops`: the paths of a run, by
    default those that go with `work.attention`. `compile` lays the model out as for compilation, but counts the
    uncompiled ops. Raises ValueError for a rank that there is not.
    """
    from gptlite.plan.simulate_step import ops_of

    if not 0 <= rank < work.layout.world_size:
        raise ValueError(f"rank {rank} of a world of {work.layout.world_size}")
    ops = ops_of(work) if ops is None else ops

    def run(micro_batches: int) -> Simulation:
        return _run(work, rank, micro_batches, ops, compile)

    few, more = _enough(work)
    if more >= work.micro_batches:
        return run(work.micro_batches)
    return _extended(run(few), run(more), work.micro_batches)


def _run(work: Workload, rank: int, micro_batches: int, ops: Ops, compile: bool) -> Simulation:
    from gptlite.plan.simulate_bytes import step_bytes
    from gptlite.plan.simulate_step import watched_step

    watch = watched_step(work, rank, micro_batches, ops, compile)
    found = step_bytes(watch.changes, watch.labels, watch.samples)
    transfers = [Transfer(*key[:4], count, key[4]) for key, count in sorted(watch.sent.items())]
    return Simulation(found.peak, found.at_once, found.history, transfers, watch.flops, micro_batches)


def _enough(work: Workload) -> tuple[int, int]:
    """Two numbers of micro-batches between which one more adds what any further one does."""
    config, count = work.parallelism, work.micro_batches
    if config.pipeline == 1:
        return 2, 3
    if not rule(config).even_rounds:  # a V is full at twice its ranks
        full = 2 * config.pipeline if rule(config).v_shape else config.pipeline
        return full + 1, full + 2
    rounds = max(1, count // config.pipeline)
    each = count // rounds
    few, more = 2 * each, 3 * each
    same = all(number // max(1, number // config.pipeline) == each for number in (few, more))
    return (few, more) if same else (count, count)


def _extended(few: Simulation, more: Simulation, micro_batches: int) -> Simulation:
    """The larger one, and the difference once for each micro-batch more."""
    step, left = more.simulated - few.simulated, micro_batches - more.simulated

    def extended(before: int, after: int) -> int:
        return after + (after - before) * left // step

    def extended_bytes(before: RankBytes, after: RankBytes) -> RankBytes:
        names = [field.name for field in fields(RankBytes)]
        return RankBytes(**{name: extended(getattr(before, name), getattr(after, name)) for name in names})

    counts = Counter({_key(each): each.count for each in few.transfers})
    return Simulation(
        extended_bytes(few.peak, more.peak),
        extended_bytes(few.at_once, more.at_once),
        more.history,
        [
            Transfer(
                each.axis, each.kind, each.ranks, each.payload, extended(counts[_key(each)], each.count), each.phase
            )
            for each in more.transfers
        ],
        extended(few.flops, more.flops),
        more.simulated,
    )


def _key(transfer: Transfer) -> tuple[object, ...]:
    return transfer.axis, transfer.kind, transfer.ranks, transfer.payload, transfer.phase
