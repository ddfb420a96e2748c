"""Predicted memory of a rank in a training step, without running it.

Model state is counted as in gptlite.satellites.monitor.model_state. It peaks at the start of a backward pass or at the
update. All other memory (activations and temporary memory of ops, collectives and FSDP2) is accumulated over the rank's
passes in order. A pass of a stage is represented by a tape: a list of bytes in order, allocated if positive, freed if
negative. Its entries come from the stage's profile, and from FSDP2's gathers and reductions in between."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from typing import NamedTuple

import numpy as np

from gptlite.parallelism.config import Offload
from gptlite.parallelism.layout import rule, splits_backward
from gptlite.satellites.plan.cache import cached
from gptlite.satellites.plan.compression import (
    gradient_codec,
    keeps_whole,
    kept_bytes,
    pending_bytes,
    steps_of_run,
    sum_buffers,
    update_buffers,
)
from gptlite.satellites.plan.messages import buffer_bytes, pass_bytes
from gptlite.satellites.plan.optimizers import Shard, state_bytes
from gptlite.satellites.plan.parameters import (
    Parameter,
    StageParameters,
    copies,
    cut,
    expert_shards,
    gathered_elements,
    shard_sizes,
    shared,
    stages,
)
from gptlite.satellites.plan.profile import halves_of, profile_key, profile_of
from gptlite.satellites.plan.segments import Segment
from gptlite.satellites.plan.traffic import buffers_bytes, sums_copies_often
from gptlite.satellites.plan.walk import Turn, turns
from gptlite.satellites.plan.workload import MASTER, RankBytes, Workload, frees_messages

Passes = dict[tuple[str, bool, bool], tuple[int, int]]  # result of `passes_of`


def most(work: Workload) -> tuple[int, RankBytes]:
    """Return the pipeline rank that needs the most memory, and its bytes.

    With a V-shaped schedule, all ranks are estimated. Otherwise, only the first rank of each kind (see
    PipelinePartition) is, because it has the most micro-batches in flight.
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
    if not work.exchanging and steps_of_run(work)[1]:  # such a step takes the most, as errors and masks are kept
        return estimate(replace(work, exchanging=True), pp_rank, tp_rank)
    held, host = stages(work, pp_rank, tp_rank), 0
    parameters, gradients, activations = _walked(work, held, pp_rank, tp_rank)
    optimizer, compression = _optimizer(work, held), kept_bytes(work, held, stages(work, pp_rank))
    if work.on_host:
        shards = work.layout.size("dp_shard")
        shard = sum(stage.scalars if work.in_files else stage.sharded(shards) for stage in held)
        errors = compression * (gradient_codec(work) is not None)
        host = optimizer + (work.stored + MASTER) * shard + errors
        optimizer, compression = 0, compression - errors
    return RankBytes(parameters, gradients, optimizer, activations, host, compression)


def _walked(work: Workload, held: list[StageParameters], pp_rank: int, tp_rank: int) -> tuple[int, int, int]:
    """Return the bytes of parameters and of gradients when their sum peaks, and the peak of all other memory. The sum
    peaks at the start of a backward pass or at the update."""
    numbers = {stage.number for stage in held}
    passes, states = [passes_of(work, stage, tp_rank) for stage in held], [ModelState(work, stage) for stage in held]
    different, order = turns(work.parallelism, pp_rank, work.micro_batches)
    rows = []
    for turn in different:
        peak, change = passes[turn.place][turn.kind, turn.first, turn.last]
        during, after = pass_bytes(work, turn.kind, held[turn.place].number, numbers)
        rows.append((peak + during, change + after, *states[turn.place].changes(turn), turn.kind != "F"))
    peaks, changes, gathered, freed, summed, backward = np.array(rows)[order].T
    before, partial, reduced = (np.cumsum(each) - each for each in (changes, gathered - freed, summed))
    unsharded = partial + gathered
    at = np.argmax(np.where(backward, unsharded + reduced, -1))
    shards = work.layout.size("dp_shard")
    elements = 0 if work.on_host else sum(stage.scalars if work.in_files else stage.sharded(shards) for stage in held)
    inside = work.stored * elements + int(unsharded[at]), int(reduced[at])
    parameters, gradients = max(inside, (work.stored * elements, MASTER * elements), key=sum)
    # Buffers that sum the gradients of tied parameters of which two ranks have a copy.
    tied = [2 * copy.shard(work.layout.size("dp_shard")) * MASTER for copy in copies(held)]
    top = max(0, int((before + peaks).max()), *tied)
    if work.exchanging:
        top = max(top, update_buffers(work, held))
    return parameters, gradients, top + pending_bytes(work, held) + buffer_bytes(work, held)


class ModelState:
    """Bytes of a stage's model state other than parameter shards and optimizer state: `gathered` parameters, and the
    accumulated gradients, `reduced` before the last micro-batch and `done` after it."""

    def __init__(self, work: Workload, stage: StageParameters) -> None:
        shards, zero = work.layout.size("dp_shard"), work.parallelism.zero
        size = MASTER * (stage.scalars if work.in_files else stage.sharded(shards))
        blocks = 0 if zero == 3 else sum(count * stage.bucket([kind], shards) for kind, count in stage.runs)
        self.gathered = work.gather_item * (gathered_elements(stage.others, shards) + blocks) * work.sharded
        self.done = 0 if work.on_host else size  # offload moves reduced gradients to the host
        self.reduced, self.frees, self.first = self.done, zero == 3, stage.first
        if zero < 2:
            self.reduced = work.reduce_item * stage.sharded(1)
        elif work.layout.size("dp_replicate") > 1 and not sums_copies_often(work):
            # sums over the shard axis only, in the reduction dtype
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


def _optimizer(work: Workload, held: list[StageParameters]) -> int:
    """Return the bytes of the optimizer state. If the state is on disk, return those of its buffers and step counts."""
    if work.parallelism.offload is Offload.nvme:
        count = sum(len(stage.parameters()) for stage in held)
        return buffers_bytes(work, held) + MASTER * count * work.optimizer.counts
    shards = work.layout.size("dp_shard")
    kinds = [(stage.others, False, 1) for stage in held]
    kinds += [(stage.kinds[kind], True, count) for stage in held for kind, count in stage.runs]
    return state_bytes(
        work.optimizer,
        [
            Shard(each.shard_shape(shards), inside and not each.embedding, count)
            for group, inside, count in kinds
            for each in group
        ],
    )


def highest(tape: list[int]) -> int:
    """Return the peak of a tape above its start."""
    return max(accumulate(tape, initial=0))


def repeated(tape: list[int], times: int) -> list[int]:
    """Return a tape with the total change and the peak of `times` repetitions. Each repetition changes the level
    equally, so the first or the last one has the peak, and one entry replaces the others."""
    return [*tape, sum(tape) * (times - 2), *tape] if times > 1 else tape * times


def _key(work: Workload, stage: StageParameters, tp_rank: int) -> tuple[object, ...]:
    """Return the fields that `passes_of` depends on: those of the profile, the stage, and FSDP2."""
    config, shards = work.parallelism, work.layout.size("dp_shard")
    zeropp = config.zeropp.gradients, config.zeropp.node_size, work.node_ranks
    sums = work.layout.size("dp_replicate"), config.compression, zeropp, work.exchanging
    fsdp = shards, config.zero, config.bucket_layers, config.offload is Offload.none, work.half_sums, sums
    return profile_key(work, tp_rank), stage.runs, stage.first, stage.last, work.micro_batches == 1, *fsdp


@cached(_key)
def passes_of(work: Workload, stage: StageParameters, tp_rank: int) -> Passes:
    """Return, for each pass of a stage, its peak above the level before it and its change of the level. Keys are the
    kind, `first` and `last` of `walk.Turn`."""
    memory = _Stage(work, stage, tp_rank)
    first = later = memory.forward(memory.frees, memory.added)
    if memory.gathered and not memory.frees:
        # Parameters that stay gathered are gathered in the first pass. Its gradients count as model state, because
        # there are no earlier gradients to which they are added.
        first = memory.forward(True, memory.holds)
    kept = sum(later)
    passes = {("F", True, False): (highest(first), kept), ("F", False, False): (highest(later), kept)}
    backward = memory.backward
    if memory.split and not stage.first:
        inputs = memory.inputs()
        passes["I", False, False] = highest(inputs), sum(inputs)
        kept, backward = kept + sum(inputs), partial(memory.weights, kept + sum(inputs))
    # The buffer of a pass's last reduction is held until the stage's next reduction begins.
    carried = backward(work.sharded and memory.often, 0)[1]
    for is_first, is_last in product((False, True), repeat=2):
        before = 0 if is_first else carried
        tape, after = backward(work.sharded and (is_last or memory.often), before)
        change = after * (not is_last) - before - kept
        passes["B", is_first, is_last] = passes["W", is_first, is_last] = highest(tape), change
    return passes


class _Reduction(NamedTuple):
    """Gradients that FSDP2 reduces together: `size`, their unsharded bytes in the reduction dtype; `gradients`, their
    bytes in the dtype in which a pass computes them; the number of shards; `buffers` of compressed sums; `kept` for a
    1-bit optimizer, to the end of the step."""

    size: int
    gradients: int
    shards: int
    buffers: int = 0
    kept: int = 0


class _Bucket(NamedTuple):
    """Blocks that FSDP2 gathers and reduces together; `times` is the number of equal buckets in a row.

    In bytes, 0 without gathers: `gathered`, the gathered bucket; `ahead`, the parameters prefetched during its backward
    pass. `reductions`: first that of distributed experts, if any, then that of the other parameters.
    """

    kinds: tuple[int, ...]
    times: int
    gathered: int
    ahead: int
    reductions: list[_Reduction]


class _Stage:
    """A stage with its profile, FSDP2's buffers, and the handling of gradients.

    `others`: the reduction of the parameters outside blocks. `buckets`: FSDP2's buckets in forward order. `frees`:
    gathered buckets are freed after each pass. `often`: each pass reduces its gradients. `added`: gradients are
    allocated in addition to accumulated ones; otherwise they count as model state. `holds`: FSDP2 holds a block's
    gradients until it reduces them; otherwise each gradient is added to the accumulated gradient and freed.
    """

    def __init__(self, work: Workload, stage: StageParameters, tp_rank: int) -> None:
        config, shards, sharded = work.parallelism, work.layout.size("dp_shard"), work.sharded
        self.work, self.stage, self.profile = work, stage, profile_of(work, tp_rank)
        self.split = splits_backward(config)
        comes_and_goes = sharded and (shards > 1 or config.offload is not Offload.none)
        others = gathered_elements(stage.others, shards) * sharded
        self.others_gathered = others * work.gather_item
        self.others = self.reduction(stage.others, 0)
        self.frees = config.zero == 3 and comes_and_goes
        held = work.gather_item if sharded else work.stored  # bytes of a parameter as a layer uses it
        self.often, self.added = config.zero >= 2 or work.micro_batches == 1, sharded or work.micro_batches > 1
        # FSDP2 accumulates in fp32 the gradients that are computed in 16 bits.
        self.holds = sharded and (self.often or held < work.reduce_item)
        self.buckets, earlier = list[_Bucket](), None
        for kinds, times in stage.buckets(config.bucket_layers):
            gathered = stage.bucket(kinds, shards) * work.gather_item * comes_and_goes
            # While a bucket's distributed experts are gathered, the prefetched bucket does not include its experts.
            without = stage.bucket(kinds, shards, experts=False) * work.gather_item * (gathered > 0)
            ahead = without if times > 1 or earlier is None else earlier
            earlier = without if gathered else earlier
            parameters = tuple(each for kind in kinds for each in stage.kinds[kind])
            reductions = [
                self.reduction(some, sum(each.elements for each in some) * held * self.holds)
                for some in (shared(parameters, True), shared(parameters, False))
                if some
            ]
            self.buckets.append(_Bucket(kinds, times, gathered, ahead, reductions))
        self.gathered = sum(each.gathered * each.times for each in self.buckets)

    def reduction(self, parameters: tuple[Parameter, ...], gradients: int) -> _Reduction:
        """Return the reduction of the gradients of parameters, of which a pass holds so many bytes."""
        work, shards = self.work, self.work.layout.size("dp_shard")
        size = gathered_elements(parameters, shards) * work.sharded
        among, sizes = parameters[0].among if parameters else 1, shard_sizes(parameters, shards)
        kept = MASTER * size * keeps_whole(work)
        buffers = sum_buffers(work, sizes) if size else 0
        return _Reduction(size * work.reduce_item, gradients, expert_shards(shards, among), buffers, kept)

    def tape(self, segments: Iterable[Segment], added: bool, owns_input: bool = True) -> list[int]:
        """Return the tape of consecutive segments. `added`: see Segment.tape. `owns_input`: likewise, for the first
        one."""
        tape = list[int]()
        for segment in segments:
            tape += segment.tape(added, self.holds, owns_input)
            owns_input = True
        return tape

    def reduced(self, reductions: Iterable[_Reduction], before: int) -> tuple[list[int], int]:
        """Return the tape of reductions in sequence, and the bytes of the last one's input, which is held until the
        next reduction. `before`: those of the reduction before.

        The resulting shards count as model state and are not on the tape. If the reduction dtype is not fp32, the tape
        includes temporary shards in that dtype.
        """
        tape = list[int]()
        for size, gradients, shards, buffers, kept in reductions:
            received = size - size // shards if self.work.device == "cpu" else 0
            if self.work.reduce_item < MASTER:
                received += size // shards
            if size:
                received = kept or buffers or received
                tape += [-before, size, -gradients, received, kept - received]
                before = size
        return tape, before

    def remaining(self, before: int) -> tuple[list[int], int]:
        """Return the result of `reduced` for the end of a pass. A split backward pass, which runs no hooks, ends with
        all reductions. torch 2.15 then frees the last one's input."""
        blocks = [each for bucket in self.buckets for each in bucket.reductions * bucket.times] if self.split else []
        tape, held = self.reduced([self.others, *blocks], before)
        return ([*tape, -held], 0) if self.split and frees_messages() else (tape, held)

    def forward(self, gathers: bool, added: bool) -> list[int]:
        """Return the tape of a forward pass. `gathers`: the pass gathers buckets, and holds each bucket's buffer until
        the next gather or the backward pass."""
        stage, profile, owns_input = self.stage, self.profile, self.stage.first
        before = self.others_gathered * gathers * (not self.gathered)  # with buckets, the first one's gather frees it
        tape = [before, *self.tape([profile.begin] if stage.first else [], added)]
        for bucket in self.buckets:
            for count in (1, bucket.times - 1):
                buffer, freed = (bucket.gathered or before) * gathers, bucket.gathered * self.frees
                blocks = self.tape((profile.blocks[kind] for kind in bucket.kinds), added, owns_input)
                tape, before, owns_input = (
                    tape + repeated([buffer - before, freed, *blocks, -freed], count),
                    buffer,
                    True,
                )
        return [*tape, *self.tape([profile.end] if stage.last else [], added), -before]

    def backward(self, reduces: bool, before: int) -> tuple[list[int], int]:
        """Return the tape of a whole backward pass, and the bytes of its last reduction's input. `reduces`: the pass
        reduces gradients. `before`: bytes of the input of the reduction before this pass."""
        stage, profile = self.stage, self.profile
        whole = self.gathered * self.frees * self.split  # before a split pass, the whole stage is gathered
        tape, owns_input = [*self.tape([profile.end_back] if stage.last else [], self.added), whole], stage.last
        for bucket in reversed(self.buckets):
            gathered, ahead = (each * self.frees * (not self.split) for each in (bucket.gathered, bucket.ahead))
            reductions = bucket.reductions * (reduces and not self.split)
            for count in (1, bucket.times - 1):
                last, *others = reversed(bucket.kinds)
                segments = [(profile.blocks_back if owns_input else profile.received)[last]]
                segments += [profile.blocks_back[kind] for kind in others]
                blocks = self.tape(segments, self.added, owns_input)
                reduced, before = self.reduced(reductions, before)
                tape += repeated([gathered + ahead, *blocks, -gathered, *reduced, -ahead], count)
                owns_input = True
        tape += [-whole, *self.tape([profile.begin_back] if stage.first else [], self.added)]
        reduced, before = self.remaining(before) if reduces else ([], before)
        return tape + reduced, before

    def inputs(self) -> list[int]:
        """Return the tape of the I half of a backward pass."""
        found, gathered = halves_of(self.work, self.stage.blocks), self.gathered * self.frees
        end, blocks = ([found.inputs_end] if self.stage.last else [], [found.inputs])
        inside = repeated(self.tape(blocks, self.added), self.stage.units)
        return [gathered, *self.tape(end, self.added), *inside, -gathered]

    def weights(self, kept: int, reduces: bool, before: int) -> tuple[list[int], int]:
        """Return the tape of the W half of a backward pass, as `backward` does. `kept`: bytes that the forward pass and
        the I half left."""
        found = halves_of(self.work, self.stage.blocks)
        whole = (self.gathered + self.others_gathered) * self.frees
        copied = self.buckets[-1].gathered * self.frees  # the bucket gathered last is copied out of its buffer
        peak = highest(self.tape([found.weights_end if self.stage.last else found.weights], self.added))
        made = sum(each.gradients * bucket.times for bucket in self.buckets for each in bucket.reductions)
        tape = [whole, copied, -copied, peak, -peak, made - kept, -whole]
        reduced, before = self.remaining(before) if reduces else ([], before)
        return tape + reduced, before
