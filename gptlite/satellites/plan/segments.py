"""Profile of a model's parts in a micro-batch: memory allocated and freed, ops, communication.

A profile has forward and backward segments of the beginning of the model, each kind of block and the model's end. Does
not import torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from gptlite.parallelism.axes import DATA_AXES
from gptlite.satellites.plan.workload import Transfer

PLAIN, GRADIENT, ADDED, UPSTREAM = "plain", "gradient", "added", "upstream"
MATMUL, ATTENTION, MOVE = "matmul", "attention", "move"
SIZES = (2, 4)  # recorded micro-batch sizes, in sequences; not 1, for which some ops copy less
PARTS = 2  # number of blocks of a part whose split backward pass is recorded


class MemoryEvent(NamedTuple):
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

    events: tuple[MemoryEvent, ...] = ()
    ops: tuple[Op, ...] = ()
    sent: tuple[Transfer, ...] = ()

    def tape(self, added: bool, held: bool, owns_input: bool = True) -> list[int]:
        """Return the bytes of the events in order.

        `added`: gradients are allocated in addition to earlier ones; if False, they count as model state and are left
        out. `held`: these additional gradients are held until they are reduced. `owns_input`: the tensor that the
        segment received (a gradient or a block's input) is freed in it; False if it is a pipeline buffer.
        """
        dropped = {UPSTREAM} if not owns_input else set()
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
        transfers = Counter(self.inputs_end.sent) + (Counter(self.weights_end.sent) - weights) if end else Counter()
        for sent in self.inputs.sent:
            transfers[sent] += blocks
        for sent, count in weights.items():
            transfers[sent] += count * blocks // self.parts
        return transfers


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
        return type(one)(*found) if isinstance(one, MemoryEvent | Op | Transfer) else tuple(found)
    if isinstance(one, Profile | Halves | Segment):
        return type(one)(*(_between(getattr(one, each.name), getattr(two, each.name), share) for each in fields(one)))
    if one != two:
        raise ValueError(f"{one} is not {two}")
    return one
