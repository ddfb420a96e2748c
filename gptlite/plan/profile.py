"""What a part of a model does in a micro-batch: the bytes it takes and gives back, its ops, what it sends.

A profile has a segment for the beginning of the model, one block and the end, forward and backward. It is recorded by
running the model's own code once with fake tensors (`probe.py`), at two sizes of micro-batch; others follow from these,
for bytes and shapes grow linearly. Where the two differ in more than sizes (a loss in more chunks), the size asked for
is recorded itself. No torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from gptlite.parallelism.config import ActivationCheckpointing
from gptlite.parallelism.layout import Layout, splits_backward
from gptlite.plan.cache import cached
from gptlite.plan.workload import Workload

PLAIN, GRADIENT, ADDED, UPSTREAM = "plain", "gradient", "added", "upstream"
MATMUL, ATTENTION, MOVE = "matmul", "attention", "move"
SIZES = (2, 4)  # micro-batches that are recorded, in sequences: of one alone some ops copy less
PARTS = 2  # blocks of the parts whose halves of backward passes are recorded
SHORTEST = 512  # positions: a shorter sequence may be less than a kernel works on at a time


class Event(NamedTuple):
    """Bytes taken, or where negative given back.

    role: `gradient` where a parameter's gradient begins, `added` where it has been added to earlier ones, `upstream`
    where the gradient that the segment was given is given back, else `plain`.
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


class Sent(NamedTuple):
    """A collective: axis, kind, ranks and bytes of the whole tensor."""

    axis: str
    kind: str
    ranks: int
    payload: float
    phase: str


@dataclass(frozen=True)
class Segment:
    """What happens between two points of a pass, in order."""

    events: tuple[Event, ...] = ()
    ops: tuple[Op, ...] = ()
    sent: tuple[Sent, ...] = ()

    def tape(self, added: bool, held: bool, given: bool = True) -> list[int]:
        """Bytes in order. `added`: gradients come on top of earlier ones, else the new ones are model state. `held`:
        they stay until they are reduced. `given`: what the segment is given (a gradient, a block's input) is this
        rank's own, not a buffer of its pipeline."""
        dropped = {UPSTREAM} if not given else set()
        if not added:
            dropped |= {GRADIENT, ADDED}
        elif held:
            dropped.add(ADDED)
        return [round(event.size) for event in self.events if event.role not in dropped]

    @cached_property
    def left(self) -> int:
        """Bytes that remain, gradients aside."""
        return sum(self.tape(added=False, held=False))


@dataclass(frozen=True)
class Halves:
    """Passes of parts whose backward pass is in halves. `inputs`: of the half of the input's gradient, that of a block
    and that of the end. `weights`: the other half of a part of PARTS blocks, and `weights_end` of one that has the end
    of the model too."""

    inputs: Segment
    inputs_end: Segment
    weights: Segment
    weights_end: Segment

    def sent(self, blocks: int, end: bool) -> Counter[Sent]:
        """What the backward pass of a part with so many blocks sends, a micro-batch."""
        weights = Counter(self.weights.sent)
        found = Counter(self.inputs_end.sent) + (Counter(self.weights_end.sent) - weights) if end else Counter()
        for sent in self.inputs.sent:
            found[sent] += blocks
        for sent, count in weights.items():
            found[sent] += count * blocks // PARTS
        return found


@dataclass(frozen=True)
class Profile:
    """Segments of a model, one block's among them; `begin_back`, `block_back` and `end_back`: of the backward pass."""

    begin: Segment
    block: Segment
    end: Segment
    begin_back: Segment
    block_back: Segment
    end_back: Segment


def between(small: Any, large: Any, sequences: int) -> Any:
    """The Profile or Halves of so many sequences, from those of SIZES; None where these differ in more than sizes."""
    try:
        return _between(small, large, (sequences - SIZES[0]) / (SIZES[1] - SIZES[0]))
    except ValueError:
        return None


def _between(one: Any, two: Any, share: float) -> Any:
    """Each float between that of one record and that of the other. Raises ValueError if anything else differs."""
    if isinstance(one, float):
        return one + (two - one) * share
    if isinstance(one, tuple):
        found = [_between(a, b, share) for a, b in zip(one, two, strict=True)]
        return type(one)(*found) if isinstance(one, Event | Op | Sent) else tuple(found)
    if isinstance(one, Profile | Halves | Segment):
        return type(one)(*(_between(getattr(one, each.name), getattr(two, each.name), share) for each in fields(one)))
    if one != two:
        raise ValueError(f"{one} is not {two}")
    return one


def _key(work: Workload, tp_rank: int = 0) -> tuple[object, ...]:
    """What a profile depends on."""
    config, layout = work.parallelism, work.layout
    degrees = layout.size("tp"), layout.context, layout.size("pp") == 1, work.sharded
    how = config.sequence, config.activation_checkpointing, splits_backward(config)
    return work.same, work.micro_batch_size, *degrees, *how, tp_rank


@cached(_key)
def profile_of(work: Workload, tp_rank: int = 0) -> Profile:
    """What the model of a workload does on a rank of the tensor axis."""
    from gptlite.plan.probe import record

    return _scaled(work, lambda smaller: profile_of(smaller, tp_rank)) or record(work, tp_rank)


@cached(_key)
def halves_of(work: Workload) -> Halves:
    """What parts of a pipeline do whose backward passes are in halves."""
    from gptlite.plan.probe import record_halves

    return _scaled(work, halves_of) or record_halves(work)


def _scaled(work: Workload, of: Callable[[Workload], Any]) -> Any:
    """From two smaller micro-batches where a large one is asked for; None where it has to be recorded."""
    if work.micro_batch_size <= SIZES[-1] or work.rank_length < SHORTEST:
        return None
    small, large = (of(replace(work, micro_batch_size=size)) for size in SIZES)
    return between(small, large, work.micro_batch_size)


@cached(
    lambda work: (
        work.same,
        work.layout.size("tp"),
        work.layout.context,
        work.parallelism.sequence,
        work.micro_batch_size,
    )
)
def plain_profile(work: Workload) -> Profile:
    """The profile of a pipeline's part under FSDP2, without recomputation and with whole backward passes: those of
    others follow from it closely enough to be timed."""
    config = replace(
        work.parallelism, activation_checkpointing=ActivationCheckpointing.none, schedule="1f1b", pipeline=2
    )
    degrees = (2, 1, 2 * work.layout.context, work.layout.size("tp"))
    return profile_of(replace(work, parallelism=config, layout=Layout(degrees, work.layout.folded)))
