"""From the allocations of a simulated step to bytes by category, over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gptlite.plan.workload import RankBytes

CATEGORIES = ("parameters", "gradients", "optimizer")
ACTIVATIONS = "activations"

Change = tuple[int, int]  # a storage's number, bytes; negative where they are given back


@dataclass(frozen=True)
class StepBytes:
    """What a step takes. `peak` has model state at the instant of those sampled when it was most, and the most that
    all else took at one instant, as `parallelism.memory_watch` counts; `at_once` is the instant with the largest total.

    `history`: a phase of the step, and the instant of it with the largest total.
    """

    peak: RankBytes
    at_once: RankBytes
    history: list[tuple[str, RankBytes]]


def step_bytes(
    changes: Sequence[Change],
    labels: Sequence[tuple[int, str]],
    samples: Sequence[tuple[int, dict[str, set[int]]]],
) -> StepBytes:
    """Of the phases that `labels` begin: (change it begins with, name). What comes before the first is no part of it.

    A storage that is model state in some sample is so all its life. Raises ValueError without labels or samples.
    """
    if not labels or not samples:
        raise ValueError("no step was watched")
    category = {number: name for _, state in samples for name, numbers in state.items() for number in numbers}
    history: list[tuple[str, RankBytes]] = []
    most_beside = 0
    for label, instants in _phases(changes, labels, category):
        fullest, total = dict[str, int](), -1
        for instant in instants:
            most_beside = max(most_beside, instant[ACTIVATIONS])
            if (now := sum(instant.values())) > total:
                fullest, total = instant.copy(), now
        history.append((label, RankBytes(**fullest)))
    sizes = _sizes_at(changes, [at for at, _ in samples])
    states = [
        {name: sum(held.get(number, 0) for number in state[name]) for name in CATEGORIES}
        for (_, state), held in zip(samples, sizes, strict=True)
    ]
    peak = RankBytes(**max(states, key=lambda state: sum(state.values())), activations=most_beside)
    return StepBytes(peak, max((each for _, each in history), key=lambda each: each.total), history)


def _phases(
    changes: Sequence[Change], labels: Sequence[tuple[int, str]], category: dict[int, str]
) -> Iterator[tuple[str, Iterator[dict[str, int]]]]:
    """Each phase with its instants: bytes by category when it begins and after each change. The dict is reused."""
    now: dict[str, int] = dict.fromkeys((*CATEGORIES, ACTIVATIONS), 0)

    def apply(first: int, last: int) -> Iterator[dict[str, int]]:
        yield now
        for number, size in changes[first:last]:
            now[category.get(number, ACTIVATIONS)] += size
            yield now

    for _ in apply(0, labels[0][0]):
        pass
    ends = [start for start, _ in labels[1:]] + [len(changes)]
    for (start, label), end in zip(labels, ends, strict=True):
        yield label, apply(start, end)


def _sizes_at(changes: Sequence[Change], instants: Sequence[int]) -> Iterator[dict[int, int]]:
    """Bytes of each storage at some instants, in order. The dict is reused."""
    held: dict[int, int] = {}
    done = 0
    for at in instants:
        for number, size in changes[done:at]:
            held[number] = held.get(number, 0) + size
        done = at
        yield held
