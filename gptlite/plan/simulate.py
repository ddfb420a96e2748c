"""Simulation of one rank of any world on a CPU: memory, communication and FLOPs of a step.

The engine's own model, layout, optimizer, schedule and step run with fake tensors and simulated ranks, so they behave
as on a real rank. With many micro-batches only the first ones are run, and the rest is extrapolated: see `simulate`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from gptlite.parallelism.layout import rule
from gptlite.plan.profile import Op
from gptlite.plan.simulate_step import State, watched_step
from gptlite.plan.watch import Change
from gptlite.plan.workload import RankBytes, Transfer, Workload


@dataclass(frozen=True)
class Simulation:
    """A step of one rank. `peak`: model state at its peak, and the peak of activations (all else), each at its own
    instant."""

    peak: RankBytes
    transfers: list[Transfer]
    flops: int

    @classmethod
    def of(cls, counts: Counter[str | Transfer]) -> Simulation:
        """Return the simulation from counts of each transfer, of FLOPs, and of bytes by category."""
        sizes = {key: size for key, size in counts.items() if isinstance(key, str)}
        sent = sorted((key, count) for key, count in counts.items() if isinstance(key, Transfer))
        flops = sizes.pop("flops")
        return cls(RankBytes(**sizes), [each._replace(count=count) for each, count in sent], flops)


def simulate(work: Workload, rank: int) -> Simulation:
    """Simulate a step of one rank of the workload's world. Call it in a process without a process group.

    With more micro-batches than `enough` needs, two numbers of micro-batches are simulated, and their difference is
    added for each further one. This is exact: once a pipeline is full, each further micro-batch adds the same
    transfers, FLOPs and bytes (of its activations in GPipe, of its receive buffers in any schedule). Raises ValueError
    for a rank outside the world.
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
    """Return two numbers of micro-batches whose difference is that of any further micro-batches."""
    config, count = work.parallelism, work.micro_batches
    if config.pipeline == 1:
        return 2, 3
    if not rule(config).even_rounds:  # a V-shaped schedule is full at twice its ranks
        full = 2 * config.pipeline if rule(config).v_shape else config.pipeline
        return full + 1, full + 2
    # Interleaved schedules run in rounds; the two numbers must give rounds of the same size, or nothing is saved.
    rounds = max(1, count // config.pipeline)
    each = count // rounds
    few, more = 2 * each, 3 * each
    same = all(number // max(1, number // config.pipeline) == each for number in (few, more))
    return (few, more) if same else (count, count)


def counted(work: Workload, rank: int, micro_batches: int) -> Counter[str | Transfer]:
    """Return the counts of a step with that many micro-batches: see `Simulation.of`."""
    watch = watched_step(work, rank, micro_batches)
    found = Counter[str | Transfer](each for each in watch.log if isinstance(each, Transfer))
    found["flops"] = sum(int(each.flops) for each in watch.log if isinstance(each, Op))
    found.update(peak(watch.log, watch.begin, watch.samples))
    return found


def peak(log: Sequence[Change | Op | Transfer], begin: int, samples: Sequence[State]) -> dict[str, int]:
    """Return the model state by category at the sample where it peaks, and the peak of all else from `begin` on.

    The definitions are those of `parallelism.memory_watch`. A storage that is model state in some sample counts as such
    for its whole life. Raises ValueError without samples.
    """
    state = {number for sample in samples for sizes in sample.values() for number in sizes}
    sizes = (each.size if isinstance(each, Change) and each.number not in state else 0 for each in log)
    beside = islice(accumulate(sizes, initial=0), begin, None)
    sums = ({name: sum(sizes.values()) for name, sizes in sample.items()} for sample in samples)
    return {**max(sums, key=lambda sample: sum(sample.values())), "activations": max(beside)}
