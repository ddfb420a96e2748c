"""One rank of any world, simulated on a CPU without its devices: memory, transfers and FLOPs of a step.

The engine's own model, layout, optimizer, schedule and step run with tensors that hold no data and ranks that are
imagined, so what they do is what a real rank would do. With many micro-batches, the first ones are run and the rest are
more of the same: see `simulate`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from gptlite.parallelism.layout import rule
from gptlite.plan.profile import Op, Sent
from gptlite.plan.simulate_step import State, watched_step
from gptlite.plan.watch import Change
from gptlite.plan.workload import RankBytes, Transfer, Workload


@dataclass(frozen=True)
class Simulation:
    """A step of one rank. peak: model state when it is most, and the most that activations (all else) take, whenever
    that is."""

    peak: RankBytes
    transfers: list[Transfer]
    flops: int

    @classmethod
    def of(cls, counts: Counter[str | Sent]) -> Simulation:
        """From counts of each transfer, of FLOPs, and of bytes by category."""
        sizes = {key: size for key, size in counts.items() if isinstance(key, str)}
        sent = sorted((key, count) for key, count in counts.items() if isinstance(key, Sent))
        transfers = [Transfer(each.axis, each.kind, each.ranks, int(each.payload), n, each.phase) for each, n in sent]
        return cls(RankBytes(**{key: sizes[key] for key in sizes if key != "flops"}), transfers, sizes["flops"])


def simulate(work: Workload, rank: int) -> Simulation:
    """What a rank of the workload's world does in a step. To be called in a process that has joined no other ranks.

    Where there are more micro-batches than show what one more adds, two numbers of them are simulated, and the
    difference is added for each of the others: once a pipeline is full, a further micro-batch adds the same transfers,
    FLOPs and bytes (of its activations in GPipe, of buffers to receive it in any). Raises ValueError for a rank that
    there is not.
    """
    if not 0 <= rank < work.layout.world_size:
        raise ValueError(f"rank {rank} of a world of {work.layout.world_size}")
    few, more = enough(work)
    if more >= work.micro_batches:
        return Simulation.of(counted(work, rank, work.micro_batches))
    before, after = counted(work, rank, few), counted(work, rank, more)
    left = work.micro_batches - more
    further = {key: count + (count - before[key]) * left // (more - few) for key, count in after.items()}
    return Simulation.of(Counter(further))


def enough(work: Workload) -> tuple[int, int]:
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


def counted(work: Workload, rank: int, micro_batches: int) -> Counter[str | Sent]:
    """What a step of so many micro-batches counts: see `Simulation.of`."""
    watch = watched_step(work, rank, micro_batches)
    found = Counter[str | Sent](each for each in watch.log if isinstance(each, Sent))
    found["flops"] = sum(int(each.flops) for each in watch.log if isinstance(each, Op))
    found.update(peak(watch.log, watch.begin, watch.samples))
    return found


def peak(log: Sequence[Change | Op | Sent], begin: int, samples: Sequence[State]) -> dict[str, int]:
    """Model state, by category, at the instant of those sampled when it was most, and the most that all else took at
    one instant from `begin` on, as `parallelism.memory_watch` counts.

    A storage that is model state in some sample is so all its life. Raises ValueError without samples.
    """
    state = {number for sample in samples for sizes in sample.values() for number in sizes}
    sizes = (each.size if isinstance(each, Change) and each.number not in state else 0 for each in log)
    beside = islice(accumulate(sizes, initial=0), begin, None)
    sums = ({name: sum(sizes.values()) for name, sizes in sample.items()} for sample in samples)
    return {**max(sums, key=lambda sample: sum(sample.values())), "activations": max(beside)}
