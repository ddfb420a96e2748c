"""Profile of a model's parts in a micro-batch: memory allocated and freed, ops, communication.

A profile has forward and backward segments of the beginning of the model, each kind of block and the model's end. It is
recorded by running the model's code with fake tensors (`probe.py`), at two micro-batch sizes. Larger sizes are
extrapolated, as bytes and shapes grow linearly, except for samples on a CPU, where oneDNN may choose another algorithm
for a convolution. If the two profiles differ in more than sizes, e.g. in the number of a
loss's chunks, the requested size is recorded instead. Does not import torch.
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
from gptlite.plan.parameters import with_blocks
from gptlite.plan.workload import SETTLED, Transfer, Workload

PLAIN, GRADIENT, ADDED, UPSTREAM = "plain", "gradient", "added", "upstream"
MATMUL, ATTENTION, MOVE = "matmul", "attention", "move"
SIZES = (2, 4)  # recorded micro-batch sizes, in sequences; not 1, for which some ops copy less
PARTS = 2  # number of blocks of a part whose split backward pass is recorded
SHORTEST = 512  # positions; bytes of a shorter sequence may not be linear, as it can be below a kernel's chunk size


class Event(NamedTuple):
    """Bytes allocated, or freed if negative.

    role: `gradient` for the allocation of a parameter's gradient, `added` for its release after accumulation into
    earlier ones, `upstream` for the release of the tensor that the segment received, else `plain`.
    """

    size: float
    role: str = PLAIN


class Op(NamedTuple):
    """A compute op. kind: `matmul`, of products [rows, inner] x [inner, columns]; fused `attention` of `rows` queries
    and `columns` keys in heads of width `inner`, 0 if unknown; or `move`, without arithmetic. `kept`: selective
    recomputation keeps the op's result."""

    kind: str
    moved: float  # bytes read and written
    flops: float = 0.0
    rows: float = 0.0
    inner: float = 0.0
    columns: float = 0.0
    kept: bool = False


@dataclass(frozen=True)
class Segment:
    """Memory events, ops and collectives between two points of a pass, in order."""

    events: tuple[Event, ...] = ()
    ops: tuple[Op, ...] = ()
    sent: tuple[Transfer, ...] = ()

    def tape(self, added: bool, held: bool, given: bool = True) -> list[int]:
        """Return the bytes of the events in order.

        `added`: gradients are allocated in addition to earlier ones; if False, they count as model state and are left
        out. `held`: these additional gradients are held until they are reduced. `given`: the tensor that the segment
        received (a gradient or a block's input) is freed in it; False if it is a pipeline buffer.
        """
        dropped = {UPSTREAM} if not given else set()
        if not added:
            dropped |= {GRADIENT, ADDED}
        elif held:
            dropped.add(ADDED)
        return [round(event.size) for event in self.events if event.role not in dropped]

    @cached_property
    def left(self) -> int:
        """Bytes allocated in the segment that are not freed at its end, without gradients."""
        return sum(self.tape(added=False, held=False))


@dataclass(frozen=True)
class Halves:
    """Profiles of the halves of split backward passes.

    `inputs` and `inputs_end` have the half for the input's gradient: of one block, and of the model's end. `weights`
    and `weights_end` have the half for the weights' gradients: of PARTS blocks, without and with the model's end. If
    blocks differ, a stage counts as one block: `parts` is 1, and the block includes the model's end.
    """

    inputs: Segment
    inputs_end: Segment
    weights: Segment
    weights_end: Segment
    parts: int = PARTS

    def sent(self, blocks: int, end: bool) -> Counter[Transfer]:
        """Return the collectives per micro-batch of the backward pass of `blocks` blocks and, if `end`, the model's
        end."""
        weights = Counter(self.weights.sent)
        found = Counter(self.inputs_end.sent) + (Counter(self.weights_end.sent) - weights) if end else Counter()
        for sent in self.inputs.sent:
            found[sent] += blocks
        for sent, count in weights.items():
            found[sent] += count * blocks // self.parts
        return found


@dataclass(frozen=True)
class Profile:
    """Segments of a model's forward pass, and of its backward pass in the fields that end in `back`. `blocks` has one
    segment per kind of block. `received`: `blocks_back` of blocks whose output's gradient was received from the next
    stage, and so is contiguous."""

    begin: Segment
    blocks: tuple[Segment, ...]
    end: Segment
    begin_back: Segment
    blocks_back: tuple[Segment, ...]
    end_back: Segment
    received: tuple[Segment, ...]

    @cached_property
    def pairs(self) -> list[tuple[Segment, Segment]]:
        """Pairs of a forward and a backward segment, for the beginning, each kind of block and the end."""
        forward, backward = (self.begin, *self.blocks, self.end), (self.begin_back, *self.blocks_back, self.end_back)
        return list(zip(forward, backward, strict=True))

    @cached_property
    def sums_data(self) -> bool:
        """True if data ranks communicate inside the model, e.g. for the statistics of a synchronized batch norm."""
        return any(sent.axis in DATA_AXES for pair in self.pairs for each in pair for sent in each.sent)


def between(small: Any, large: Any, sequences: int) -> Any:
    """Return the Profile or Halves for micro-batches of `sequences`, extrapolated from those for SIZES; None if these
    differ in more than sizes."""
    try:
        return _between(small, large, (sequences - SIZES[0]) / (SIZES[1] - SIZES[0]))
    except ValueError:
        return None


def _between(one: Any, two: Any, share: float) -> Any:
    """Return one + (two - one) * share for each float of two records. Raises ValueError if anything else differs."""
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


def profile_key(work: Workload, tp_rank: int = 0) -> tuple[object, ...]:
    """Return the cache key of a profile: the fields that it depends on."""
    config, layout = work.parallelism, work.layout
    degrees = layout.size("tp"), layout.context, layout.size(EXPERT), layout.size("pp") == 1, work.sharded
    # On a CPU, ranks share the cores, and oneDNN's memory depends on a rank's number of threads.
    ranks = layout.world_size if work.device == "cpu" else 0
    how = ranks, config.sequence, config.activation_checkpointing, splits_backward(config), layout.data_size > 1
    return work.same, work.micro_batch_size, *degrees, *how, tp_rank


@cached(profile_key)
def profile_of(work: Workload, tp_rank: int = 0) -> Profile:
    """Return the profile of a workload's model on the tensor rank `tp_rank`."""
    from gptlite.plan.probe import record

    return _related(work, lambda other: profile_of(other, tp_rank)) or record(work, tp_rank)


@cached(lambda work, blocks=None: (profile_key(work), blocks))
def halves_of(work: Workload, blocks: range | None = None) -> Halves:
    """Return the profiles of split backward passes in a pipeline; if blocks differ, those of the stage with
    `blocks`."""
    from gptlite.plan.probe import record_halves

    return _related(work, lambda other: halves_of(other, blocks)) or record_halves(work, blocks)


def _related(work: Workload, of: Callable[[Workload], Any]) -> Any:
    """Return the result of `of` for the model with few blocks, or extrapolated from the micro-batch sizes SIZES; None
    if the workload has to be recorded."""
    if (few := with_blocks(work.model, PARTS + 2)) != work.model:  # at most as many are recorded
        return of(replace(work, model=few))
    linear = work.rank_length >= SHORTEST if work.sample is None else work.device != "cpu"
    if work.micro_batch_size <= SIZES[-1] or not linear:
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
    """Return the profile under FSDP2 in a pipeline, without recomputation and split backward passes.

    The time of other layouts is derived from this profile, since the differences are small.
    """
    config = replace(
        work.parallelism, activation_checkpointing=ActivationCheckpointing.none, schedule="1f1b", pipeline=2
    )
    degrees = (2, 1, math.lcm(2 * work.layout.context, work.layout.size(EXPERT)), work.layout.size("tp"))
    work = replace(work, parallelism=config, layout=Layout(degrees, work.layout.folded))
    return profile_of(work.balanced(SETTLED))
