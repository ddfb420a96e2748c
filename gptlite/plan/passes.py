"""Bytes that a pipeline stage's passes take: its profile run through, with what FSDP2 gathers and reduces between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gptlite.parallelism.config import Offload
from gptlite.parallelism.layout import splits_backward
from gptlite.plan.parameters import Parameter, Stage, padded
from gptlite.plan.profile import Profile, Segment, halves_of, profile_of
from gptlite.plan.workload import MASTER, Workload


@dataclass(frozen=True)
class Taken:
    """A pass, or half of a backward one: the most beyond what was there before, and what it leaves.

    `reducing`: the most once its gradients are being reduced, and what an earlier reduction has left is given back.
    """

    most: int
    left: int
    reducing: int | None = None


@dataclass
class _Level:
    """What is there, and the most there was."""

    now: int = 0
    most: int = 0
    before: int | None = None  # the most before the first reduction

    def reduce(self) -> None:
        """From here on gradients are reduced."""
        if self.before is None:
            self.before, self.most = self.most, self.now

    def leaving(self, size: int) -> Taken:
        """All of it, as a pass that leaves `size`."""
        return Taken(self.most, size) if self.before is None else Taken(self.before, size, self.most)

    def run(self, sizes: list[int]) -> None:
        for size in sizes:
            self.now += size
            self.most = max(self.most, self.now)

    def repeat(self, sizes: list[int], times: int) -> None:
        """A tape several times over: it rises or falls by the same each time, so the first and the last tell."""
        if times > 1:
            each = sum(sizes)
            self.most = max(self.most, self.now + most(sizes))
            self.now += each * (times - 1)
        if times > 0:
            self.run(sizes)


@dataclass(frozen=True)
class Groups:
    """What FSDP2 holds for a stage, in bytes: of a bucket of blocks and of the other parameters, gathered and their
    gradients, whole; 0 where it does not. `reduces`: whether a backward pass ends in a reduction."""

    buckets: int
    blocks: int  # in a bucket, and in the last one
    last_blocks: int
    gathered: int
    last_gathered: int
    bucket: int
    last_bucket: int
    others: int
    item: int  # bytes of a number of these gradients
    shards: int
    frees: bool  # gathered buckets are freed after each pass
    reduces: bool
    pairwise: bool

    @classmethod
    def of(cls, work: Workload, stage: Stage, final: bool = False) -> Groups:
        """Of a stage, in a step's last backward pass of it or in others."""
        shards = work.layout.size("dp_shard")
        comes_and_goes = shards > 1 or work.parallelism.offload is not Offload.none
        blocks = min(work.parallelism.bucket_layers, stage.layers)
        buckets = -(-stage.layers // work.parallelism.bucket_layers)
        last = stage.layers - (buckets - 1) * blocks

        def elements(parameters: Sequence[Parameter]) -> int:
            return padded(parameters, shards) if work.sharded else 0

        return cls(
            buckets=buckets,
            blocks=blocks,
            last_blocks=last,
            gathered=elements(stage.block * blocks) * work.gather_item if comes_and_goes else 0,
            last_gathered=elements(stage.block * last) * work.gather_item if comes_and_goes else 0,
            bucket=elements(stage.block * blocks) * work.reduce_item,
            last_bucket=elements(stage.block * last) * work.reduce_item,
            others=elements(stage.others) * work.reduce_item,
            item=work.reduce_item,
            shards=shards,
            frees=work.parallelism.zero == 3 and comes_and_goes,
            reduces=work.sharded and (final or work.parallelism.zero >= 2 or work.micro_batches == 1),
            pairwise=work.device == "cpu",
        )

    def reduction(self, size: int, grads: int) -> list[int]:
        """From gradients to their shards, which are model state; the whole ones stay until the next reduction.

        What is received is summed into the shards themselves, or into others of the dtype that is summed in.
        """
        received = size - size // self.shards if self.pairwise and self.shards > 1 else 0
        if self.item < MASTER:
            received += size // self.shards
        return [size, -grads, received, -received] if size else []

    def at_once(self, grads: int) -> list[int]:
        """All reductions, one after the other, where no hook of the backward pass begins them."""
        tape, before = self.reduction(self.others, 0), self.others
        for _ in range(self.buckets):
            tape += [-before, *self.reduction(self.bucket, grads // self.buckets)]
            before = self.bucket
        return tape

    def carried(self, split: bool) -> int:
        """What the last reduction of a backward pass has begun with, held until the next one begins."""
        return (self.bucket if split or not self.others else self.others) if self.reduces else 0


def most(tape: Iterable[int]) -> int:
    """The most bytes at once, of those that a tape allocates."""
    return max(accumulate(tape, initial=0))


@dataclass(frozen=True)
class _Model:
    """A stage with its profile, and what becomes of the gradients that a pass makes.

    `added`: they come on top of earlier ones; the first ones are model state from the beginning. `holds`: FSDP2 holds
    them until it reduces them, else each is added to what there is and given back.
    """

    stage: Stage
    profile: Profile
    added: bool
    holds: bool
    gradients: int  # bytes of a block's

    @classmethod
    def of(cls, work: Workload, stage: Stage, tp_rank: int) -> _Model:
        sharded, config = work.sharded, work.parallelism
        held = work.gather_item if sharded else work.stored  # bytes of a parameter that a layer is given
        # FSDP2 accumulates in fp32 what is computed in 16 bits.
        holds = sharded and (config.zero >= 2 or work.micro_batches == 1 or held < work.reduce_item)
        added = sharded or work.micro_batches > 1
        elements = sum(parameter.elements for parameter in stage.block)
        return cls(stage, profile_of(work, tp_rank), added, holds, elements * held * holds)

    def tape(self, segment: Segment, given: bool = True) -> list[int]:
        """A segment's bytes, those of gradients as they are in all passes but the first."""
        return segment.tape(self.added, self.holds, given)


def passes_of(work: Workload, stage: Stage, tp_rank: int) -> dict[str, Taken]:
    """Of each kind of pass of a stage: `first` and later forward passes, B, I and W, and the `last` ones of a step."""
    groups, its = Groups.of(work, stage), _Model.of(work, stage, tp_rank)
    first, forward = _forward(its, groups)
    found = {"first": first, "F": forward}
    final, split = Groups.of(work, stage, final=True), splits_backward(work.parallelism)
    for name, grouped in (("", groups), ("last ", final)):
        if name and final == groups:
            found |= {name + kind: found[kind] for kind in "BW" if kind in found}
            continue
        if split and not stage.first:
            inputs, weights = _halves(work, its, grouped, forward.left)
            found |= {"I": inputs, f"{name}W": weights}
        else:  # of a split backward pass all is done in its second half: nobody wants the gradient of tokens
            whole = _backward(its, grouped, split, forward.left)
            found |= {f"{name}B": whole, f"{name}W": whole, "I": Taken(0, 0)}
    return found


def _forward(its: _Model, groups: Groups) -> tuple[Taken, Taken]:
    """The first forward pass of a step, and any other."""
    later = _forward_level(its, groups, groups.gathered if groups.frees else 0, its.added)
    if groups.frees or not groups.gathered:
        return Taken(later.most, later.now), Taken(later.most, later.now)
    # Parameters that stay are gathered in the first pass, whose gradients are the first, and so model state.
    first = _forward_level(its, groups, groups.gathered, its.holds)
    return Taken(first.most, later.now), Taken(later.most, later.now)


def _forward_level(its: _Model, groups: Groups, buffer: int, added: bool) -> _Level:
    """`buffer`: of the last bucket that was gathered, held until the next one is, or the backward pass begins."""
    level, stage, profile = _Level(), its.stage, its.profile
    if stage.first:
        level.run(profile.begin.tape(added, its.holds))
    freed = groups.gathered if groups.frees else 0
    level.run([buffer + freed])
    level.run(profile.block.tape(added, its.holds, given=stage.first))
    level.repeat(profile.block.tape(added, its.holds), stage.layers - 1)
    level.run([-freed])
    if stage.last:
        level.run(profile.end.tape(added, its.holds))
    level.run([-buffer])
    return level


def _backward(its: _Model, groups: Groups, split: bool, kept: int) -> Taken:
    level, stage, profile = _Level(), its.stage, its.profile
    # The last blocks and those that come next; half a pass has all of the stage.
    gathered = groups.gathered * groups.buckets if split else groups.gathered + groups.last_gathered
    gathered *= groups.frees
    if stage.last:
        level.run(its.tape(profile.end_back))
    each, reducing = its.tape(profile.block_back), groups.reduces and not split
    level.run([gathered, *its.tape(profile.block_back, stage.last), *each * (groups.last_blocks - 1)])
    size = groups.last_bucket * reducing
    if reducing:
        level.reduce()
        level.run(groups.reduction(size, its.gradients * groups.last_blocks))
    for times in (1, groups.buckets - 2) if groups.buckets > 1 else ():
        reduction = groups.reduction(groups.bucket, its.gradients * groups.blocks) if reducing else []
        level.repeat([*each * groups.blocks, -size, *reduction], times)
        size = groups.bucket * reducing
    level.run([-gathered])
    if stage.first:
        level.run(its.tape(profile.begin_back))
    if split and groups.reduces:
        level.reduce()
        level.run(groups.at_once(its.gradients * stage.layers))
    elif groups.reduces and groups.others:
        level.run([-size, *groups.reduction(groups.others, 0)])
    return level.leaving(-kept)


def _halves(work: Workload, its: _Model, groups: Groups, kept: int) -> tuple[Taken, Taken]:
    """The halves of a backward pass: of its input's gradient, and of the weights' from what the first has left.
    Gradients are reduced at the end of the other."""
    layers, end, found = its.stage.layers, its.stage.last, halves_of(work)
    gathered = groups.gathered * groups.buckets * groups.frees
    level = _Level()
    level.run([gathered, *(its.tape(found.inputs_end) if end else ())])
    level.repeat(its.tape(found.inputs), layers)
    level.run([-gathered])
    inputs = level.leaving(level.now)
    level = _Level()
    # What is gathered last is copied for a moment.
    whole = gathered + (groups.others // groups.item * work.gather_item) * groups.frees
    copied, peak = groups.gathered * groups.frees, most(its.tape(found.weights_end if end else found.weights))
    level.run([whole, copied, -copied, peak, -peak, its.gradients * layers - kept - inputs.left, -whole])
    if groups.reduces:
        level.reduce()
        level.run(groups.at_once(its.gradients * layers))
    return inputs, level.leaving(-kept - inputs.left)
