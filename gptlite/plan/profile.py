"""What a part of a model does in a micro-batch: the bytes it takes and gives back, its ops, what it sends.

A profile has a segment for the beginning of the model, one block and the end, forward and backward. It is recorded by
running the model's own code once with fake tensors (`probe.py`), at two sizes of micro-batch; others follow from these,
for bytes and shapes grow linearly. Where the two differ in more than sizes (a loss in more chunks), the size asked for
is recorded itself. No torch here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from gptlite.parallelism.layout import splits_backward
from gptlite.plan.parameters import Known
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
        found = Counter[Sent]()
        for sent in self.inputs.sent:
            found[sent] += blocks
        for sent, count in Counter(self.weights.sent).items():
            found[sent] += count * blocks // PARTS
        if end:
            found.update(self.inputs_end.sent)
            found.update(Counter(self.weights_end.sent) - Counter(self.weights.sent))
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
    share = (sequences - SIZES[0]) / (SIZES[1] - SIZES[0])
    segments = [_segment(getattr(small, each.name), getattr(large, each.name), share) for each in fields(small)]
    return None if None in segments else type(small)(*segments)


def _segment(one: Segment, two: Segment, share: float) -> Segment | None:
    rows = [_rows(a, b, share) for a, b in ((one.events, two.events), (one.ops, two.ops), (one.sent, two.sent))]
    return None if None in rows else Segment(rows[0], rows[1], rows[2])  # type: ignore[arg-type]


def _rows(one: Sequence[tuple], two: Sequence[tuple], share: float) -> tuple | None:
    """Each number between that of one record and that of the other, if all else is equal."""
    if len(one) != len(two):
        return None
    found = []
    for a, b in zip(one, two, strict=True):
        if any(x != y for x, y in zip(a, b, strict=True) if not isinstance(x, float)):
            return None
        row = (x + (y - x) * share if isinstance(x, float) else x for x, y in zip(a, b, strict=True))
        found.append(type(a)(*row))
    return tuple(found)


@dataclass(frozen=True)
class Recipe:
    """What a profile depends on, of a workload: `work`, with the rest as it is left out. `key` stands for it."""

    work: Workload = field(compare=False)
    key: tuple[object, ...]

    @classmethod
    def of(cls, work: Workload, tp_rank: int = 0) -> Recipe:
        """Of a rank of the tensor axis."""
        config, layout = work.parallelism, work.layout
        degrees = layout.size("tp"), layout.context, tp_rank, layout.size("pp") == 1, work.sharded
        how = config.sequence, config.activation_checkpointing, splits_backward(config)
        sizes = work.micro_batch_size, work.sequence_length
        numbers = work.dtype, work.attention, work.device, work.master_weights, work.amp
        return cls(work, (Known(work.model), *degrees, *how, *sizes, *numbers))

    @property
    def tp_rank(self) -> int:
        """The rank of the tensor axis."""
        return self.key[3]  # type: ignore[return-value]


def profile_of(work: Workload, tp_rank: int = 0) -> Profile:
    """What the model of a workload does on a rank of the tensor axis."""
    return _profile(Recipe.of(work, tp_rank))


def halves_of(work: Workload) -> Halves:
    """What parts of a pipeline do whose backward passes are in halves."""
    return _halves(Recipe.of(work))


@lru_cache(maxsize=1024)
def _profile(recipe: Recipe) -> Profile:
    from gptlite.plan.probe import record

    return _scaled(recipe, _profile) or record(recipe.work, recipe.tp_rank)


@lru_cache(maxsize=1024)
def _halves(recipe: Recipe) -> Halves:
    from gptlite.plan.probe import record_halves

    return _scaled(recipe, _halves) or record_halves(recipe.work)


def _scaled(recipe: Recipe, recorded: Callable[..., Any]) -> Any:
    """From two smaller micro-batches, where a large one is asked for."""
    work = recipe.work
    if work.micro_batch_size <= SIZES[-1] or work.rank_length < SHORTEST:
        return None
    small, large = (recorded(Recipe.of(replace(work, micro_batch_size=size), recipe.tp_rank)) for size in SIZES)
    return between(small, large, work.micro_batch_size)
