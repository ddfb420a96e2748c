"""Profile of a model's parts in a micro-batch: memory allocated and freed, ops, communication.

A profile has a segment for the beginning of the model, each kind of block and the end, forward and backward. It is
recorded by running the model's own code with fake tensors (`probe.py`), at two micro-batch sizes. Other sizes are
interpolated, as bytes and shapes grow linearly. If the two differ in more than sizes (a loss in more chunks), the
requested size is recorded itself. No torch here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from gptlite.parallelism.axes import DATA_AXES, EXPERT
from gptlite.parallelism.config import ActivationCheckpointing
from gptlite.parallelism.layout import Layout, splits_backward
from gptlite.plan.cache import cached
from gptlite.plan.workload import SETTLED, Transfer, Workload

PLAIN, GRADIENT, ADDED, UPSTREAM = "plain", "gradient", "added", "upstream"
MATMUL, ATTENTION, MOVE = "matmul", "attention", "move"
SIZES = (2, 4)  # recorded micro-batch sizes, in sequences; with a single sequence some ops copy less
PARTS = 2  # blocks of the parts whose split backward passes are recorded
SHORTEST = 512  # positions: a shorter sequence may be below a kernel's chunk size, and then bytes are not linear


class Event(NamedTuple):
    """Bytes allocated, or freed if negative.

    role: `gradient` at the allocation of a parameter's gradient, `added` after its accumulation into earlier ones,
    `upstream` at the release of the gradient that the segment received, else `plain`.
    """

    size: float
    role: str = PLAIN


class Op(NamedTuple):
    """An op that computes. kind: `matmul`, of products [rows, inner] x [inner, columns]; `attention`, in one kernel; or
    `move`, which only reads and writes. `kept`: selective recomputation keeps its result."""

    kind: str
    moved: float  # bytes read and written
    flops: float = 0.0
    rows: float = 0.0
    inner: float = 0.0
    columns: float = 0.0
    kept: bool = False


@dataclass(frozen=True)
class Segment:
    """Memory events, ops and communication between two points of a pass, in order."""

    events: tuple[Event, ...] = ()
    ops: tuple[Op, ...] = ()
    sent: tuple[Transfer, ...] = ()

    def tape(self, added: bool, held: bool, given: bool = True) -> list[int]:
        """Return the bytes in order. `added`: gradients are allocated beside earlier ones, else the new ones are model
        state. `held`: they are held until they are reduced. `given`: the segment's input (a gradient, a block's input)
        belongs to this rank and is not a buffer of its pipeline."""
        dropped = {UPSTREAM} if not given else set()
        if not added:
            dropped |= {GRADIENT, ADDED}
        elif held:
            dropped.add(ADDED)
        return [round(event.size) for event in self.events if event.role not in dropped]

    @cached_property
    def left(self) -> int:
        """Bytes that remain at the end, without gradients."""
        return sum(self.tape(added=False, held=False))


@dataclass(frozen=True)
class Halves:
    """Profiles of split backward passes. `inputs`: the half for the input's gradient of a block, and `inputs_end` of
    the model's end. `weights`: the other half of a part of PARTS blocks, and `weights_end` of a part that also has the
    model's end. If blocks differ, a stage counts as one block: `parts` is 1, and the model's end belongs to it."""

    inputs: Segment
    inputs_end: Segment
    weights: Segment
    weights_end: Segment
    parts: int = PARTS

    def sent(self, blocks: int, end: bool) -> Counter[Transfer]:
        """Return the collectives of the backward pass of a part with that many blocks, per micro-batch."""
        weights = Counter(self.weights.sent)
        found = Counter(self.inputs_end.sent) + (Counter(self.weights_end.sent) - weights) if end else Counter()
        for sent in self.inputs.sent:
            found[sent] += blocks
        for sent, count in weights.items():
            found[sent] += count * blocks // self.parts
        return found


@dataclass(frozen=True)
class Profile:
    """Segments of a model, of its blocks one per kind; `begin_back`, `blocks_back` and `end_back` are of the backward
    pass."""

    begin: Segment
    blocks: tuple[Segment, ...]
    end: Segment
    begin_back: Segment
    blocks_back: tuple[Segment, ...]
    end_back: Segment

    @cached_property
    def pairs(self) -> list[tuple[Segment, Segment]]:
        """Forward and backward segments: of the beginning, of each kind of block, of the end."""
        forward, backward = (self.begin, *self.blocks, self.end), (self.begin_back, *self.blocks_back, self.end_back)
        return list(zip(forward, backward, strict=True))

    @cached_property
    def sums_data(self) -> bool:
        """True if data ranks communicate inside the model, for the statistics of a batch norm."""
        return any(sent.axis in DATA_AXES for pair in self.pairs for each in pair for sent in each.sent)


def between(small: Any, large: Any, sequences: int) -> Any:
    """Return the Profile or Halves interpolated to `sequences`, from those of SIZES; None if they differ in more than
    sizes."""
    try:
        return _between(small, large, (sequences - SIZES[0]) / (SIZES[1] - SIZES[0]))
    except ValueError:
        return None


def _between(one: Any, two: Any, share: float) -> Any:
    """Interpolate each float between two records. Raises ValueError if anything else differs."""
    if isinstance(one, float):
        return one + (two - one) * share
    if isinstance(one, tuple):
        found = [_between(a, b, share) for a, b in zip(one, two, strict=True)]
        return type(one)(*found) if isinstance(one, Event | Op | Transfer) else tuple(found)
    if isinstance(one, Profile | Halves | Segment):
        return type(one)(*(_between(getattr(one, each.name), getattr(two, each.name), share) for each in fields(one)))
    if one != two:
        raise ValueError(f"{one} is not {two}")
    return one


def _key(work: Workload, tp_rank: int = 0) -> tuple[object, ...]:
    """Return the fields that a profile depends on."""
    config, layout = work.parallelism, work.layout
    degrees = layout.size("tp"), layout.context, layout.size(EXPERT), layout.size("pp") == 1, work.sharded
    how = config.sequence, config.activation_checkpointing, splits_backward(config), layout.data_size > 1
    return work.same, work.micro_batch_size, *degrees, *how, tp_rank


@cached(_key)
def profile_of(work: Workload, tp_rank: int = 0) -> Profile:
    """Return the profile of a workload's model on a rank of the tensor axis."""
    from gptlite.plan.probe import record

    return _scaled(work, lambda smaller: profile_of(smaller, tp_rank)) or record(work, tp_rank)


@cached(lambda work, blocks=None: (_key(work), blocks))
def halves_of(work: Workload, blocks: range | None = None) -> Halves:
    """Return the profiles of a pipeline's parts with split backward passes; if blocks differ, of the stage with
    `blocks`."""
    from gptlite.plan.probe import record_halves

    return _scaled(work, lambda smaller: halves_of(smaller, blocks)) or record_halves(work, blocks)


def _scaled(work: Workload, of: Callable[[Workload], Any]) -> Any:
    """Interpolate from two smaller micro-batches for a large one; None if it has to be recorded."""
    if work.micro_batch_size <= SIZES[-1] or (work.sample is None and work.rank_length < SHORTEST):
        return None
    small, large = (of(replace(work, micro_batch_size=size)) for size in SIZES)
    return between(small, large, work.micro_batch_size)


@cached(
    lambda work: (
        work.same,
        work.layout.size("tp"),
        work.layout.folded,
        work.parallelism.sequence,
        work.micro_batch_size,
    )
)
def plain_profile(work: Workload) -> Profile:
    """Return the profile of a pipeline's part under FSDP2, without recomputation and with whole backward passes.

    Other layouts differ little enough from it that their time can be derived from it.
    """
    config = replace(
        work.parallelism, activation_checkpointing=ActivationCheckpointing.none, schedule="1f1b", pipeline=2
    )
    degrees = (2, 1, math.lcm(2 * work.layout.context, work.layout.size(EXPERT)), work.layout.size("tp"))
    work = replace(work, parallelism=config, layout=Layout(degrees, work.layout.folded))
    return profile_of(work.balanced(SETTLED))
