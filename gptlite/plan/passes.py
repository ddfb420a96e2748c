"""Bytes that a pipeline stage's passes take: its profile run through, with what FSDP2 gathers and reduces between.

All of it is in tapes: bytes in order, taken or where negative given back.
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
    """A pass, or half of a backward one: the most beyond what was there before, and what it leaves.

    `reducing`: the most once its gradients are being reduced, and what an earlier reduction has left is given back.
    """

    most: int
    left: int
    reducing: int | None = None


def most(tape: list[int]) -> int:
    """The most bytes at once, of those that a tape allocates."""
    return max(accumulate(tape, initial=0))


def repeated(tape: list[int], times: int) -> list[int]:
    """A tape several times over: it rises or falls by the same each time, so the first and the last tell."""
    return [*tape, sum(tape) * (times - 2), *tape] if times > 1 else tape * times


def _key(work: Workload, stage: Stage, tp_rank: int) -> tuple[object, ...]:
    """What `passes_of` reads."""
    config, layout = work.parallelism, work.layout
    degrees = layout.size("tp"), layout.context, layout.size("dp_shard"), layout.size("pp") == 1, work.sharded
    how = config.zero, config.sequence, config.activation_checkpointing, splits_backward(config), config.bucket_layers
    numbers = work.micro_batch_size, work.micro_batches == 1, config.offload is Offload.none, work.half_sums
    return work.same, stage.layers, stage.first, stage.last, tp_rank, *degrees, *how, *numbers


@cached(_key)
def passes_of(work: Workload, stage: Stage, tp_rank: int) -> Passes:
    """Each pass of a stage, as a `walk.Turn` tells them apart: the most that it takes beyond what was there, and by how
    much it changes that."""
    its, split = _Stage(work, stage, tp_rank), splits_backward(work.parallelism)
    first, later, kept = its.forward_passes()
    found = {("F", True, False): (first, kept), ("F", False, False): (later, kept)}
    each, final = (work.sharded and (last or its.often) for last in (False, True))
    # What a reduction leaves is there until the stage's next one begins.
    carried = (its.bucket if split or not its.others else its.others) * each
    for is_last, reduces in ((False, each), (True, final)):
        if split and not stage.first:
            inputs, weights = its.halves(reduces, kept)
        else:  # of a split backward pass all is done in its second half: nobody wants the gradient of tokens
            inputs, weights = Taken(0, 0), its.backward(reduces, kept)
        found["I", False, False] = inputs.most, inputs.left
        for is_first in (False, True):
            peak, change = weights.most, weights.left
            if weights.reducing is not None:
                before, after = 0 if is_first else carried, 0 if is_last else carried
                peak, change = max(peak, weights.reducing - before), change + after - before
            found["B", is_first, is_last] = found["W", is_first, is_last] = peak, change
    return found


class _Stage:
    """A stage with its profile, what FSDP2 holds for it, and what becomes of the gradients that a pass makes.

    In bytes: `gathered` is a bucket of blocks, `bucket` its gradients, `others` those of the other parameters, whole; 0
    where FSDP2 does not. `frees`: gathered buckets are freed after each pass. `often`: each pass reduces its gradients.
    `added`: gradients come on top of earlier ones; the first ones are model state from the beginning. `holds`: FSDP2
    holds those of a block, `gradients`, until it reduces them, else each is added to what there is and given back.
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
        held = work.gather_item if sharded else work.stored  # bytes of a parameter that a layer is given
        self.often, self.added = config.zero >= 2 or work.micro_batches == 1, sharded or work.micro_batches > 1
        # FSDP2 accumulates in fp32 what is computed in 16 bits.
        self.holds = sharded and (self.often or held < work.reduce_item)
        self.gradients = sum(parameter.elements for parameter in stage.block) * held * self.holds

    def tape(self, segment: Segment, given: bool = True) -> list[int]:
        """A segment's bytes, those of gradients as they are in all passes but the first."""
        return segment.tape(self.added, self.holds, given)

    def reduction(self, size: int, grads: int) -> list[int]:
        """From gradients to their shards, which are model state; the whole ones stay until the next reduction.

        What is received is summed into the shards themselves, or into others of the dtype that is summed in.
        """
        received = size - size // self.shards if self.work.device == "cpu" else 0
        if self.work.reduce_item < MASTER:
            received += size // self.shards
        return [size, -grads, received, -received] if size else []

    def at_once(self) -> list[int]:
        """All reductions, one after the other, where no hook of the backward pass begins them."""
        tape, before = self.reduction(self.others, 0), self.others
        for _ in range(self.buckets):
            tape += [-before, *self.reduction(self.bucket, self.gradients * self.stage.layers // self.buckets)]
            before = self.bucket
        return tape

    def forward_passes(self) -> tuple[int, int, int]:
        """The most that a step's first forward pass takes, the most that any other takes, and what they leave."""
        later = self.forward(self.gathered * self.frees, self.added)
        first = later
        if self.gathered and not self.frees:
            # Parameters that stay are gathered in the first pass, whose gradients are the first, and so model state.
            first = self.forward(self.gathered, self.holds)
        return most(first), most(later), sum(later)

    def forward(self, buffer: int, added: bool) -> list[int]:
        """`buffer`: of the last bucket that was gathered, held until the next one is, or the backward pass begins."""
        stage, profile, freed = self.stage, self.profile, self.gathered * self.frees
        tape = profile.begin.tape(added, self.holds) if stage.first else []
        tape += [buffer + freed, *profile.block.tape(added, self.holds, given=stage.first)]
        tape += [*repeated(profile.block.tape(added, self.holds), stage.layers - 1), -freed]
        return [*tape, *(profile.end.tape(added, self.holds) if stage.last else ()), -buffer]

    def backward(self, reduces: bool, kept: int) -> Taken:
        """A whole pass, after a forward one that has left `kept`."""
        stage, profile, split = self.stage, self.profile, splits_backward(self.work.parallelism)
        # The last blocks and those that come next; half a pass has all of the stage.
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
        """The halves of a pass: of its input's gradient, and of the weights' from what the first has left. Gradients
        are reduced at the end of the other."""
        layers, end, found = self.stage.layers, self.stage.last, halves_of(self.work)
        gathered = self.gathered * self.buckets * self.frees
        tape = [gathered, *(self.tape(found.inputs_end) if end else ())]
        tape += [*repeated(self.tape(found.inputs), layers), -gathered]
        inputs = _taken(tape, sum(tape))
        # What is gathered last is copied for a moment.
        whole, copied = gathered + self.others_gathered * self.frees, self.gathered * self.frees
        peak = most(self.tape(found.weights_end if end else found.weights))
        tape = [whole, copied, -copied, peak, -peak, self.gradients * layers - kept - inputs.left, -whole]
        begun = len(tape) if reduces else None
        return inputs, _taken(tape + (self.at_once() if reduces else []), -kept - inputs.left, begun)


def _taken(tape: list[int], left: int, begun: int | None = None) -> Taken:
    """A pass of such a tape, which leaves so much. `begun`: where its first reduction begins, if it reduces."""
    if begun is None:
        return Taken(most(tape), left)
    return Taken(most(tape[:begun]), left, sum(tape[:begun]) + most(tape[begun:]))
