"""Memory of a pipeline stage's passes: its profile replayed, with FSDP2's gathers and reductions in between.

Memory is recorded as tapes: lists of bytes in order, allocated if positive, freed if negative.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from gptlite.parallelism.config import Offload
from gptlite.parallelism.layout import splits_backward
from gptlite.plan.cache import cached
from gptlite.plan.parameters import Stage, shard_elements
from gptlite.plan.profile import Segment, halves_of, profile_of
from gptlite.plan.workload import MASTER, Workload

Passes = dict[tuple[str, bool, bool], tuple[int, int]]


class Taken(NamedTuple):
    """Memory of a pass, or of half a backward one: its peak above the level before it, and the change it leaves.

    `reducing`: the peak after its first gradient reduction begins, when buffers of an earlier reduction have been
    freed.
    """

    most: int
    left: int
    reducing: int | None = None


def most(tape: list[int]) -> int:
    """Return the peak of a tape."""
    return max(accumulate(tape, initial=0))


def repeated(tape: list[int], times: int) -> list[int]:
    """Return a tape several times over. Each repetition changes the level equally, so the first and the last have the
    peak."""
    return [*tape, sum(tape) * (times - 2), *tape] if times > 1 else tape * times


def _key(work: Workload, stage: Stage, tp_rank: int) -> tuple[object, ...]:
    """Return the fields that `passes_of` depends on."""
    config, layout = work.parallelism, work.layout
    degrees = layout.size("tp"), layout.context, layout.size("dp_shard"), layout.size("pp") == 1, work.sharded
    how = config.zero, config.sequence, config.activation_checkpointing, splits_backward(config), config.bucket_layers
    numbers = work.micro_batch_size, work.micro_batches == 1, config.offload is Offload.none, work.half_sums
    return work.same, stage.layers, stage.first, stage.last, tp_rank, *degrees, *how, *numbers


@cached(_key)
def passes_of(work: Workload, stage: Stage, tp_rank: int) -> Passes:
    """Return the peak of each pass of a stage above the level before it, and the change it leaves, keyed by
    the kind, `first` and `last` of `walk.Turn`."""
    memory, split = _Stage(work, stage, tp_rank), splits_backward(work.parallelism)
    first, later, kept = memory.forward_passes()
    found = {("F", True, False): (first, kept), ("F", False, False): (later, kept)}
    each, final = (work.sharded and (last or memory.often) for last in (False, True))
    # The buffer of a reduction is held until the stage's next one begins.
    carried = (memory.bucket if split or not memory.others else memory.others) * each
    for is_last, reduces in ((False, each), (True, final)):
        if split and not stage.first:
            inputs, weights = memory.halves(reduces, kept)
            found["I", False, False] = inputs.most, inputs.left
        else:  # the first stage needs no gradient of its input, so its second half does the whole backward pass
            weights = memory.backward(reduces, kept)
        for is_first in (False, True):
            peak, change = weights.most, weights.left
            if weights.reducing is not None:
                before, after = 0 if is_first else carried, 0 if is_last else carried
                peak, change = max(peak, weights.reducing - before), change + after - before
            found["B", is_first, is_last] = found["W", is_first, is_last] = peak, change
    return found


class _Stage:
    """A stage with its profile, the buffers that FSDP2 holds for it, and the handling of the gradients that a pass
    makes.

    In bytes: `gathered` is a bucket of blocks, `bucket` its gradients, `others` those of the other parameters,
    unsharded; 0 if FSDP2 does not handle them. `frees`: gathered buckets are freed after each pass. `often`: each pass
    reduces its gradients. `added`: gradients are allocated beside earlier ones, while the first ones are model state
    from the start. `holds`: FSDP2 holds a block's gradients, `gradients` bytes, until it reduces them; otherwise each
    is added to the accumulated one and freed.
    """

    def __init__(self, work: Workload, stage: Stage, tp_rank: int) -> None:
        config, shards, sharded = work.parallelism, work.layout.size("dp_shard"), work.sharded
        self.work, self.stage, self.shards, self.profile = work, stage, shards, profile_of(work, tp_rank)
        self.blocks, self.buckets = min(config.bucket_layers, stage.layers), -(-stage.layers // config.bucket_layers)
        self.last_blocks = stage.layers - (self.buckets - 1) * self.blocks
        comes_and_goes = sharded and (shards > 1 or config.offload is not Offload.none)
        block, others = (shards * shard_elements(each, shards) * sharded for each in (stage.block, stage.others))
        self.block_gathered = block * work.gather_item * comes_and_goes
        self.block_reduced, self.others = block * work.reduce_item, others * work.reduce_item
        self.gathered, self.bucket = self.blocks * self.block_gathered, self.blocks * self.block_reduced
        self.others_gathered = others * work.gather_item
        self.frees = config.zero == 3 and comes_and_goes
        held = work.gather_item if sharded else work.stored  # bytes of a parameter as a layer uses it
        self.often, self.added = config.zero >= 2 or work.micro_batches == 1, sharded or work.micro_batches > 1
        # FSDP2 accumulates in fp32 the gradients that are computed in 16 bits.
        self.holds = sharded and (self.often or held < work.reduce_item)
        self.gradients = sum(parameter.elements for parameter in stage.block) * held * self.holds

    def tape(self, segment: Segment, given: bool = True) -> list[int]:
        """Return a segment's bytes, with the gradients as in every pass but the first."""
        return segment.tape(self.added, self.holds, given)

    def reduction(self, size: int, grads: int) -> list[int]:
        """Return the tape of reducing gradients to shards, which are model state; the input is held until the next
        reduction.

        The result is accumulated into the shards themselves, or into separate ones of the reduction dtype.
        """
        received = size - size // self.shards if self.work.device == "cpu" else 0
        if self.work.reduce_item < MASTER:
            received += size // self.shards
        return [size, -grads, received, -received] if size else []

    def at_once(self) -> list[int]:
        """Return the tape of all reductions in sequence, as done when no hook of the backward pass starts them."""
        tape, before = self.reduction(self.others, 0), self.others
        for _ in range(self.buckets):
            tape += [-before, *self.reduction(self.bucket, self.gradients * self.stage.layers // self.buckets)]
            before = self.bucket
        return tape

    def forward_passes(self) -> tuple[int, int, int]:
        """Return the peak of a step's first forward pass, the peak of any other, and the bytes that they leave."""
        later = self.forward(self.gathered * self.frees, self.added)
        first = later
        if self.gathered and not self.frees:
            # Parameters that stay gathered are gathered in the first pass. Its gradients are the first ones, and so
            # count as model state.
            first = self.forward(self.gathered, self.holds)
        return most(first), most(later), sum(later)

    def forward(self, buffer: int, added: bool) -> list[int]:
        """Return the tape of a forward pass. `buffer`: bytes of the last gathered bucket, held until the next gather or
        the backward pass."""
        stage, profile, freed = self.stage, self.profile, self.gathered * self.frees
        tape = profile.begin.tape(added, self.holds) if stage.first else []
        tape += [buffer + freed, *profile.block.tape(added, self.holds, given=stage.first)]
        tape += [*repeated(profile.block.tape(added, self.holds), stage.layers - 1), -freed]
        return [*tape, *(profile.end.tape(added, self.holds) if stage.last else ()), -buffer]

    def backward(self, reduces: bool, kept: int) -> Taken:
        """Return the memory of a whole backward pass, after a forward pass that has left `kept` bytes."""
        stage, profile, split = self.stage, self.profile, splits_backward(self.work.parallelism)
        # The last blocks and the prefetched bucket; a split pass has the whole stage gathered.
        gathered = self.gathered * self.buckets if split else self.gathered + self.last_blocks * self.block_gathered
        gathered, reducing = gathered * self.frees, reduces and not split
        tape, each = self.tape(profile.end_back) if stage.last else [], self.tape(profile.block_back)
        tape += [gathered, *self.tape(profile.block_back, stage.last), *each * (self.last_blocks - 1)]
        begun, size = len(tape), self.last_blocks * self.block_reduced * reducing
        tape += self.reduction(size, self.gradients * self.last_blocks)
        for times in (1, self.buckets - 2) if self.buckets > 1 else ():
            reduction = self.reduction(self.bucket * reducing, self.gradients * self.blocks)
            tape += repeated([*each * self.blocks, -size, *reduction], times)
            size = self.bucket * reducing
        tape += [-gathered, *(self.tape(profile.begin_back) if stage.first else ())]
        if reducing:
            tape += [-size, *self.reduction(self.others, 0)] if self.others else []
        elif reduces:
            begun, tape = len(tape), tape + self.at_once()
        return _taken(tape, -kept, begun if reduces else None)

    def halves(self, reduces: bool, kept: int) -> tuple[Taken, Taken]:
        """Return the memory of both halves of a pass: the input's gradient, and the weights' gradients computed from
        what the first half left. Gradients are reduced at the end of the second half."""
        layers, end, found = self.stage.layers, self.stage.last, halves_of(self.work)
        gathered = self.gathered * self.buckets * self.frees
        tape = [gathered, *(self.tape(found.inputs_end) if end else ())]
        tape += [*repeated(self.tape(found.inputs), layers), -gathered]
        inputs = _taken(tape, sum(tape))
        # The bucket gathered last is copied out of its buffer.
        whole, copied = gathered + self.others_gathered * self.frees, self.gathered * self.frees
        peak = most(self.tape(found.weights_end if end else found.weights))
        tape = [whole, copied, -copied, peak, -peak, self.gradients * layers - kept - inputs.left, -whole]
        begun = len(tape) if reduces else None
        return inputs, _taken(tape + (self.at_once() if reduces else []), -kept - inputs.left, begun)


def _taken(tape: list[int], left: int, begun: int | None = None) -> Taken:
    """Return the memory of a pass with this tape. `begun`: index of its first reduction, None if it has none."""
    if begun is None:
        return Taken(most(tape), left)
    return Taken(most(tape[:begun]), left, sum(tape[:begun]) + most(tape[begun:]))
