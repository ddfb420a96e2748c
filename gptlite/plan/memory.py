"""Predicted memory of a rank in a training step, without running it.

Model state is counted as in gptlite.parallelism.memory. It peaks at the start of a backward pass or at the update. All
other memory (activations and temporary memory of ops, collectives and FSDP2) is accumulated over the rank's passes in
order. A pass of a stage is represented by a tape: a list of bytes in order, allocated if positive, freed if negative.
Its entries come from the stage's profile, and from FSDP2's gathers and reductions in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from gptlite.optimizer.config import Shard
from gptlite.parallelism.axes import EXPERT
from gptlite.parallelism.config import Offload
from gptlite.parallelism.layout import rule, splits_backward
from gptlite.plan.cache import cached
from gptlite.plan.parameters import Stage, copies, cut, expert_shards, gathered_elements, shared, stages
from gptlite.plan.profile import Segment, halves_of, profile_of
from gptlite.plan.traffic import buffers_bytes, message_bytes
from gptlite.plan.walk import Turn, turns
from gptlite.plan.workload import MASTER, RankBytes, Workload

Passes = dict[tuple[str, bool, bool], tuple[int, int]]  # result of `passes_of`


def most(work: Workload) -> tuple[int, RankBytes]:
    """Return the pipeline rank that needs the most memory, and its bytes.

    With a V-shaped schedule, all ranks are estimated. Otherwise, only the first rank of each kind (see Cut) is, because
    it has the most micro-batches in flight.
    """
    v_shape = rule(work.parallelism).v_shape
    ranks = range(work.layout.size("pp")) if v_shape else cut(work).first.values()
    each = {rank: estimate(work, rank) for rank in ranks}
    rank = max(each, key=lambda one: each[one].total)
    return rank, each[rank]


def estimate(work: Workload, pp_rank: int, tp_rank: int = 0) -> RankBytes:
    """Return a pipeline rank's bytes, each category at its peak.

    `tp_rank` matters if the tensor axis does not divide the vocabulary. The estimate is for the first data rank, whose
    shards are the longest.
    """
    held, host = stages(work, pp_rank, tp_rank), 0
    parameters, gradients, activations = _walked(work, held, pp_rank, tp_rank)
    optimizer = _optimizer(work, held)
    if work.on_host:
        shards = work.layout.size("dp_shard")
        host = optimizer + (work.stored + MASTER) * sum(stage.sharded(shards) for stage in held)
        optimizer = 0
    return RankBytes(parameters, gradients, optimizer, activations, host)


def _walked(work: Workload, held: list[Stage], pp_rank: int, tp_rank: int) -> tuple[int, int, int]:
    """Return the bytes of parameters and of gradients when their sum peaks, and the peak of all other memory. The sum
    peaks at the start of a backward pass or at the update."""
    numbers = {stage.number for stage in held}
    passes, states = [passes_of(work, stage, tp_rank) for stage in held], [ModelState(work, stage) for stage in held]
    different, order = turns(work.parallelism, pp_rank, work.micro_batches)
    rows = []
    for turn in different:
        peak, change = passes[turn.place][turn.kind, turn.first, turn.last]
        change += _messages(work, turn.kind, held[turn.place].number, numbers)
        rows.append((peak, change, *states[turn.place].changes(turn), turn.kind != "F"))
    peaks, changes, gathered, freed, summed, backward = np.array(rows)[order].T
    before, partial, reduced = (np.cumsum(each) - each for each in (changes, gathered - freed, summed))
    unsharded = partial + gathered
    at = np.argmax(np.where(backward, unsharded + reduced, -1))
    elements = 0 if work.on_host else sum(stage.sharded(work.layout.size("dp_shard")) for stage in held)
    inside = work.stored * elements + int(unsharded[at]), int(reduced[at])
    parameters, gradients = max(inside, (work.stored * elements, MASTER * elements), key=sum)
    # Buffers that sum the gradients of tied parameters of which two ranks have a copy.
    tied = [2 * copy.shard(work.layout.size("dp_shard")) * MASTER for copy in copies(held)]
    top = max(0, int((before + peaks).max()), *tied)
    return parameters, gradients, top + _buffers(work, held)


class ModelState:
    """Bytes of a stage's model state other than parameter shards and optimizer state: `gathered` parameters, and the
    accumulated gradients, `reduced` before the last micro-batch and `done` after it."""

    def __init__(self, work: Workload, stage: Stage) -> None:
        shards, zero = work.layout.size("dp_shard"), work.parallelism.zero
        size = MASTER * stage.sharded(shards)
        blocks = 0 if zero == 3 else sum(count * stage.bucket([kind], shards) for kind, count in stage.runs)
        self.gathered = work.gather_item * (gathered_elements(stage.others, shards) + blocks) * work.sharded
        self.done = 0 if work.on_host else size  # offload moves reduced gradients to the host
        self.reduced, self.frees, self.first = self.done, zero == 3, stage.first
        if zero < 2:
            self.reduced = work.reduce_item * stage.sharded(1)
        elif work.layout.size("dp_replicate") > 1:  # sums over the shard axis only, in the reduction dtype
            self.reduced = size * work.reduce_item // MASTER

    def changes(self, turn: Turn) -> tuple[int, int, int]:
        """Return the bytes of parameters that a pass gathers, those that it frees at its end, and the pass's change of
        the gradients' bytes."""
        if self.frees:  # the second half of a backward pass only frees what a forward pass has gathered
            half = turn.kind == "W" and not self.first
            gathers, frees = turn.fresh and not half, turn.kind != "F" and not (half and turn.fresh)
        else:
            gathers, frees = turn.kind == "F" and turn.first, turn.last
        first = turn.first and turn.kind != "F"
        summed = self.done - self.reduced * (not first) if turn.last else self.reduced * first
        return self.gathered * gathers, self.gathered * frees, summed


def _optimizer(work: Workload, held: list[Stage]) -> int:
    """Return the bytes of the optimizer state. If the state is on disk, return those of its buffers and step counts."""
    if work.parallelism.offload is Offload.nvme:
        parameters = [parameter for stage in held for parameter in stage.parameters()]
        return buffers_bytes(work, parameters) + MASTER * len(parameters) * work.optimizer.counts
    shards = work.layout.size("dp_shard")
    kinds = [(stage.others, False, 1) for stage in held]
    kinds += [(stage.kinds[kind], True, count) for stage in held for kind, count in stage.runs]
    return work.optimizer.state_bytes(
        [Shard(each.shard(shards), each.width, inside, count) for group, inside, count in kinds for each in group]
    )


def _messages(work: Workload, kind: str, number: int, mine: set[int]) -> int:
    """Return the bytes to add to those recorded as left after a pass, because its output is sent to another stage.

    Schedules with several stages per rank hold sent tensors to the end of the step, when they wait for their sends. If
    two consecutive stages are on the same rank, the first one's output is the receive buffer that `_buffers` counts.
    """
    if work.layout.size("pp") == 1:
        return 0
    before, after = message_bytes(work, number), message_bytes(work, number + 1)
    if number + 1 in mine:
        return {"F": -after, "B": after, "W": after}.get(kind, 0)
    if work.parallelism.schedule in ("gpipe", "1f1b") or kind in "FI":
        return 0
    # `_buffers` counts the input's gradient of a split backward pass, which is always kept.
    return after + before * (kind == "B" and number - 1 not in mine)


def _buffers(work: Workload, held: list[Stage]) -> int:
    """Return the bytes of a pipeline's receive buffers, one tensor per micro-batch, and of the step's inputs and
    targets. 0 without a pipeline."""
    ranks, count = work.layout.size("pp"), work.micro_batches
    if ranks == 1:
        return 0
    numbers, split = {stage.number for stage in held}, splits_backward(work.parallelism)
    ends = [message_bytes(work, each) for number in numbers for each in (number, number + 1)]
    kept = count * sum(ends)
    if split:  # a stage that receives from another rank keeps its inputs' gradients to the end of the step
        kept += count * sum(message_bytes(work, number) for number in numbers if number - 1 not in numbers)
    if work.parallelism.schedule == "1f1b" and count > ranks - held[0].number:
        kept += sum(ends)  # the steady phase holds an output and a gradient that have been sent
    return kept + count * (work.target_bytes + work.input_bytes * (0 in numbers))


class Taken(NamedTuple):
    """Bytes of a pass, or of half a backward pass: `most`, its peak above the level before it (bytes then allocated);
    `left`, its change of the level; `reducing`, the peak after the first gradient reduction begins, when an earlier
    reduction's buffer has been freed, or None if the pass reduces no gradients."""

    most: int
    left: int
    reducing: int | None = None


def highest(tape: list[int]) -> int:
    """Return the peak of a tape above its start."""
    return max(accumulate(tape, initial=0))


def repeated(tape: list[int], times: int) -> list[int]:
    """Return a tape with the total change and the peak of `times` repetitions. Each repetition changes the level
    equally, so the first or the last one has the peak, and one entry replaces the others."""
    return [*tape, sum(tape) * (times - 2), *tape] if times > 1 else tape * times


def _key(work: Workload, stage: Stage, tp_rank: int) -> tuple[object, ...]:
    """Return the fields that `passes_of` depends on."""
    config, layout = work.parallelism, work.layout
    degrees = layout.size("tp"), layout.context, layout.size("dp_shard"), layout.size("pp") == 1, work.sharded
    degrees = *degrees, layout.size(EXPERT), layout.data_size > 1
    how = config.zero, config.sequence, config.activation_checkpointing, splits_backward(config), config.bucket_layers
    numbers = work.micro_batch_size, work.micro_batches == 1, config.offload is Offload.none, work.half_sums
    return work.same, stage.runs, stage.first, stage.last, tp_rank, *degrees, *how, *numbers


@cached(_key)
def passes_of(work: Workload, stage: Stage, tp_rank: int) -> Passes:
    """Return, for each pass of a stage, its peak above the level before it and its change of the level. Keys are the
    kind, `first` and `last` of `walk.Turn`."""
    memory, split = _Stage(work, stage, tp_rank), splits_backward(work.parallelism)
    first, later, kept = memory.forward_passes()
    found = {("F", True, False): (first, kept), ("F", False, False): (later, kept)}
    each, final = (work.sharded and (last or memory.often) for last in (False, True))
    carried = memory.carried * each
    for is_last, reduces in ((False, each), (True, final)):
        if split and not stage.first:
            inputs, weights = memory.halves(reduces, kept)
            found["I", False, False] = inputs.most, inputs.left
        else:  # the first stage needs no gradient of its input, so its W half is the whole backward pass
            weights = memory.backward(reduces, kept)
        for is_first in (False, True):
            peak, change = weights.most, weights.left
            if weights.reducing is not None:
                before, after = 0 if is_first else carried, 0 if is_last else carried
                peak, change = max(peak, weights.reducing - before), change + after - before
            found["B", is_first, is_last] = found["W", is_first, is_last] = peak, change
    return found


class _Reduction(NamedTuple):
    """Gradients that FSDP2 reduces together: `size`, their unsharded bytes in the reduction dtype; `gradients`, their
    bytes in the dtype in which a pass computes them; and the number of shards."""

    size: int
    gradients: int
    shards: int


class _Bucket(NamedTuple):
    """Blocks that FSDP2 gathers and reduces together; `times` is the number of equal buckets in a row.

    In bytes, 0 without gathers: `gathered`, the gathered bucket; `ahead`, the parameters prefetched during its backward
    pass; `without`, the gathered bucket without experts that are distributed over ranks. `reductions`: first that of
    distributed experts, if any, then that of the other parameters.
    """

    kinds: tuple[int, ...]
    times: int
    gathered: int
    ahead: int
    without: int
    reductions: tuple[_Reduction, ...]

    @property
    def gradients(self) -> int:
        """Bytes of the gradients in the dtype in which a pass computes them."""
        return sum(each.gradients for each in self.reductions)


class _Stage:
    """A stage with its profile, FSDP2's buffers, and the handling of gradients.

    `others`: bytes of the unsharded gradients of the parameters outside blocks; 0 without FSDP2. `buckets`: FSDP2's
    buckets in forward order. `frees`: gathered buckets are freed after each pass. `often`: each pass reduces its
    gradients. `added`: gradients are allocated in addition to accumulated ones; otherwise they count as model state.
    `holds`: FSDP2 holds a block's gradients until it reduces them; otherwise each gradient is added to the accumulated
    gradient and freed.
    """

    def __init__(self, work: Workload, stage: Stage, tp_rank: int) -> None:
        config, self.shards, sharded = work.parallelism, work.layout.size("dp_shard"), work.sharded
        self.work, self.stage, self.profile = work, stage, profile_of(work, tp_rank)
        comes_and_goes = sharded and (self.shards > 1 or config.offload is not Offload.none)
        others = gathered_elements(stage.others, self.shards) * sharded
        self.others, self.others_gathered = others * work.reduce_item, others * work.gather_item
        self.frees = config.zero == 3 and comes_and_goes
        held = work.gather_item if sharded else work.stored  # bytes of a parameter as a layer uses it
        self.often, self.added = config.zero >= 2 or work.micro_batches == 1, sharded or work.micro_batches > 1
        # FSDP2 accumulates in fp32 the gradients that are computed in 16 bits.
        self.holds = sharded and (self.often or held < work.reduce_item)
        self.buckets = list[_Bucket]()
        for kinds, times in stage.buckets(config.bucket_layers):
            whole = stage.bucket(kinds, self.shards) * sharded
            gathered = whole * work.gather_item * comes_and_goes
            # While a bucket's distributed experts are gathered, the prefetched bucket does not include its experts.
            without = stage.bucket(kinds, self.shards, experts=False) * work.gather_item * (gathered > 0)
            before = next((each.without for each in reversed(self.buckets) if each.gathered), without)
            parameters = tuple(each for kind in kinds for each in stage.kinds[kind])
            reductions = tuple(
                _Reduction(
                    gathered_elements(some, self.shards) * work.reduce_item * sharded,
                    sum(each.elements for each in some) * held * self.holds,
                    expert_shards(self.shards, some[0].among),
                )
                for some in (shared(parameters, True), shared(parameters, False))
                if some
            )
            ahead = without if times > 1 else before
            self.buckets.append(_Bucket(kinds, times, gathered, ahead, without, reductions))
        self.gathered = sum(each.gathered * each.times for each in self.buckets)
        self.gradients = sum(each.gradients * each.times for each in self.buckets)

    @property
    def carried(self) -> int:
        """Bytes of a pass's last reduction, whose buffer is held until the stage's next reduction begins."""
        split = splits_backward(self.work.parallelism)
        sizes = [last.size for each in self.buckets for last in each.reductions[-1:] if last.size]
        if not sizes or (self.others and not split):
            return self.others
        return sizes[-1 if split else 0]

    def tape(self, segment: Segment, given: bool = True) -> list[int]:
        """Return the tape of a segment, with gradients as in every pass but the first. `given`: see Segment.tape."""
        return segment.tape(self.added, self.holds, given)

    def reduction(self, size: int, grads: int, shards: int) -> list[int]:
        """Return the tape of a reduction; the arguments are the fields of _Reduction. The input is held until the next
        reduction.

        The resulting shards count as model state and are not on the tape. If the reduction dtype is not fp32, the tape
        includes temporary shards in that dtype.
        """
        received = size - size // shards if self.work.device == "cpu" else 0
        if self.work.reduce_item < MASTER:
            received += size // shards
        return [size, -grads, received, -received] if size else []

    def blocks(self, kinds: Iterable[int], backward: bool, added: bool, given: bool) -> list[int]:
        """Return the tape of a bucket's pass. `given`: see Segment.tape, for the bucket's first block."""
        segments, tape = self.profile.blocks_back if backward else self.profile.blocks, list[int]()
        for kind in kinds:
            tape += segments[kind].tape(added, self.holds, given)
            given = True
        return tape

    def at_once(self) -> list[int]:
        """Return the tape of all reductions in sequence. A split backward pass, which runs no hooks, ends with them."""
        tape, before = self.reduction(self.others, 0, self.shards), self.others
        for bucket in self.buckets:
            for each in bucket.reductions * bucket.times:
                if each.size:
                    tape += [-before, *self.reduction(*each)]
                    before = each.size
        return tape

    def forward_passes(self) -> tuple[int, int, int]:
        """Return the peak of a step's first forward pass, the peak of any other forward pass, and the bytes left."""
        later = self.forward(self.frees, self.added)
        first = later
        if self.gathered and not self.frees:
            # Parameters that stay gathered are gathered in the first pass. Its gradients count as model state, because
            # there are no earlier gradients to which they are added.
            first = self.forward(True, self.holds)
        return highest(first), highest(later), sum(later)

    def forward(self, gathers: bool, added: bool) -> list[int]:
        """Return the tape of a forward pass. `gathers`: the pass gathers buckets, and holds each bucket's buffer until
        the next gather or the backward pass."""
        stage, profile, given = self.stage, self.profile, self.stage.first
        before = self.others_gathered * gathers * (not self.gathered)  # with buckets, the first one's gather frees it
        tape = [before, *(profile.begin.tape(added, self.holds) if stage.first else ())]
        for bucket in self.buckets:
            for count in (1, bucket.times - 1):
                buffer, freed = (bucket.gathered or before) * gathers, bucket.gathered * self.frees
                each = [buffer - before, freed, *self.blocks(bucket.kinds, False, added, given), -freed]
                tape, before, given = tape + repeated(each, count), buffer, True
        return [*tape, *(profile.end.tape(added, self.holds) if stage.last else ()), -before]

    def backward(self, reduces: bool, kept: int) -> Taken:
        """Return the memory of a whole backward pass after a forward pass that left `kept` bytes. `reduces`: the pass
        reduces gradients."""
        stage, profile, split = self.stage, self.profile, splits_backward(self.work.parallelism)
        whole = self.gathered * self.frees * split  # before a split pass, the whole stage is gathered
        tape = [*(self.tape(profile.end_back) if stage.last else ()), whole]
        begun, before, given = 0, 0, stage.last
        for bucket in reversed(self.buckets):
            gathered, ahead = (each * self.frees * (not split) for each in (bucket.gathered, bucket.ahead))
            reductions = [each for each in bucket.reductions if each.size and reduces and not split]
            for count in (1, bucket.times - 1):
                each = [gathered + ahead, *self.blocks(reversed(bucket.kinds), True, self.added, given)]
                each.append(-gathered)
                for reduction in reductions:
                    begun = begun or len(tape) + len(each)
                    each += [-before, *self.reduction(*reduction)]
                    before = reduction.size
                tape += repeated([*each, -ahead], count)
                given = True
        tape += [-whole, *(self.tape(profile.begin_back) if stage.first else ())]
        begun = begun or len(tape)
        if reduces and split:
            tape += self.at_once()
        elif reduces and self.others:
            tape += [-before, *self.reduction(self.others, 0, self.shards)]
        return _taken(tape, -kept, begun if reduces else None)

    def halves(self, reduces: bool, kept: int) -> tuple[Taken, Taken]:
        """Return the memory of the I and the W half of a backward pass after a forward pass that left `kept` bytes.
        `reduces`: gradients are reduced at the end of the W half."""
        end, found = self.stage.last, halves_of(self.work, self.stage.blocks)
        gathered, copied = self.gathered * self.frees, self.buckets[-1].gathered * self.frees
        tape = [gathered, *(self.tape(found.inputs_end) if end else ())]
        tape += [*repeated(self.tape(found.inputs), self.stage.units), -gathered]
        inputs = _taken(tape, sum(tape))
        # The bucket gathered last is copied out of its buffer.
        whole = gathered + self.others_gathered * self.frees
        peak = highest(self.tape(found.weights_end if end else found.weights))
        tape = [whole, copied, -copied, peak, -peak, self.gradients - kept - inputs.left, -whole]
        begun = len(tape) if reduces else None
        return inputs, _taken(tape + (self.at_once() if reduces else []), -kept - inputs.left, begun)


def _taken(tape: list[int], left: int, begun: int | None = None) -> Taken:
    """Return the memory of a pass with this tape. `begun`: index of its first reduction, None if it has none."""
    if begun is None:
        return Taken(highest(tape), left)
    return Taken(highest(tape[:begun]), left, sum(tape[:begun]) + highest(tape[begun:]))
