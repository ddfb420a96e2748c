"""What a pipeline stage's passes take: each module's tape run through, with what FSDP2 gathers and reduces between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gptlite.parallelism.config import ActivationCheckpointing, Offload
from gptlite.parallelism.layout import splits_backward
from gptlite.plan import tape, tape_ends
from gptlite.plan.parameters import Parameter, Stage, fused, padded
from gptlite.plan.tape import MASTER, Sizes
from gptlite.plan.workload import Workload


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
            self.most = max(self.most, self.now + tape.most(sizes))
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


def passes_of(work: Workload, stage: Stage, s: Sizes, tp_rank: int) -> dict[str, Taken]:
    """Of each kind of pass of a stage: `first` and later forward passes, B, I and W, and the `last` ones of a step."""
    groups = Groups.of(work, stage)
    reference = not fused(work) and s.tensor == 1
    ends = tape_ends.head(s, work, tp_rank, reference) if stage.last else None
    first, forward = _forward(work, stage, s, groups, ends)
    found = {"first": first, "F": forward}
    final = Groups.of(work, stage, final=True)
    for name, its in (("", groups), ("last ", final)):
        if name and final == groups:
            found |= {name + kind: found[kind] for kind in "BW" if kind in found}
            continue
        if splits_backward(work.parallelism) and not stage.first:
            inputs = _inputs(stage, s, its, ends)
            found |= {"I": inputs, f"{name}W": _weights(stage, s, its, ends, forward.left, inputs.left)}
        else:  # of a split backward pass all is done in its second half: nobody wants the gradient of tokens
            whole = _backward(work, stage, s, its, ends, forward.left)
            found |= {f"{name}B": whole, f"{name}W": whole, "I": Taken(0, 0)}
    return found


def _forward(
    work: Workload, stage: Stage, s: Sizes, groups: Groups, ends: tape_ends.HeadTapes | None
) -> tuple[Taken, Taken]:
    """The first forward pass of a step, and any other."""
    later = _forward_level(work, stage, s, groups, ends, groups.gathered if groups.frees else 0)
    if groups.frees or not groups.gathered:
        return Taken(later.most, later.now), Taken(later.most, later.now)
    # Parameters that stay are gathered in the first pass, whose gradients are the first, and so model state.
    if ends is not None and not s.holds:
        ends = replace(ends, forward=ends.first)
    first = _forward_level(work, stage, s, groups, ends, groups.gathered)
    return Taken(first.most, later.now), Taken(later.most, later.now)


def _forward_level(
    work: Workload, stage: Stage, s: Sizes, groups: Groups, ends: tape_ends.HeadTapes | None, buffer: int
) -> _Level:
    """`buffer`: of the last bucket that was gathered, held until the next one is, or the backward pass begins."""
    mode, level = work.parallelism.activation_checkpointing, _Level()
    block = tape.block_forward(s)
    if mode.recomputes:
        block = tape.recomputed_forward(s, mode is ActivationCheckpointing.selective)
    if stage.first:
        level.run(tape_ends.embed_forward(s))
    freed = groups.gathered if groups.frees else 0
    level.run([buffer + freed])
    level.repeat(block, stage.layers)
    level.run([-freed])
    if ends is not None:
        level.run(ends.forward)
    level.run([-buffer])
    return level


def _backward(
    work: Workload, stage: Stage, s: Sizes, groups: Groups, ends: tape_ends.HeadTapes | None, kept: int
) -> Taken:
    mode, level, split = work.parallelism.activation_checkpointing, _Level(), splits_backward(work.parallelism)
    body = {
        ActivationCheckpointing.none: tape.block_backward,
        ActivationCheckpointing.offload: tape.block_backward,  # as on a CPU, where the host's memory is the device's
        ActivationCheckpointing.full: tape.full_backward,
        ActivationCheckpointing.selective: tape.selective_backward,
    }[mode]
    # The last blocks and those that come next; half a pass has all of the stage.
    gathered = groups.gathered * groups.buckets if split else groups.gathered + groups.last_gathered
    gathered *= groups.frees
    tied = work.model.tied_embeddings and stage.first and stage.last
    if ends is not None:
        level.run(ends.backward)
        if not tied and not s.holds:
            level.run([-ends.gradient])
    grads = sum(parameter.elements for parameter in stage.block) * s.grad if s.holds else 0
    each, reducing = body(s, True), groups.reduces and not split
    level.run([gathered, *body(s, stage.last), *each * (groups.last_blocks - 1)])
    size = groups.last_bucket * reducing
    if reducing:
        level.reduce()
        level.run(groups.reduction(size, grads * groups.last_blocks))
    for times in (1, groups.buckets - 2) if groups.buckets > 1 else ():
        reduction = groups.reduction(groups.bucket, grads * groups.blocks) if reducing else []
        level.repeat([*each * groups.blocks, -size, *reduction], times)
        size = groups.bucket * reducing
    level.run([-gathered])
    if stage.first:
        positions, table = work.model.sequence_length, stage.others[0].rows
        level.run(tape_ends.embed_backward(s, table, positions, bool(tied)))
    if split and groups.reduces:
        level.reduce()
        level.run(groups.at_once(grads * stage.layers))
    elif groups.reduces and groups.others:
        level.run([-size, *groups.reduction(groups.others, 0)])
    return level.leaving(-kept)


def _inputs(stage: Stage, s: Sizes, groups: Groups, ends: tape_ends.HeadTapes | None) -> Taken:
    """The half of a backward pass that computes the gradient of the stage's input."""
    level = _Level()
    gathered = groups.gathered * groups.buckets if groups.frees else 0
    level.run([gathered])
    if ends is not None:
        level.run([s.slice, s.workspace(s.rows, s.width), -s.workspace(s.rows, s.width)])
    level.repeat(tape.block_inputs(s), stage.layers)
    level.run([-gathered])
    return level.leaving(level.now)


def _weights(stage: Stage, s: Sizes, groups: Groups, ends: tape_ends.HeadTapes | None, kept: int, inputs: int) -> Taken:
    """The other half, of the weights, from what the first has left. Gradients are reduced at its end."""
    gathered = (groups.gathered * groups.buckets + groups.others // groups.item * s.item) if groups.frees else 0
    norm = s.slice + s.workspace(s.rows, s.width)
    before = s.grad * (3 * s.width // s.tensor * (s.width + 1) + s.width + s.inner_width) if s.holds else 0
    gelu = s.inner + s.workspace(s.tokens, s.inner_width) - 2 * s.slice - 6 * s.heads + before
    head = s.whole + ends.gradient - (kept + inputs) * stage.layers // (stage.layers + 1) if ends is not None else 0
    grads = sum(parameter.elements for parameter in stage.block) * s.grad if s.holds else 0
    level, most = _Level(), max(norm, gelu, head, 0)
    copied = groups.gathered if groups.frees else 0  # of what is gathered last, for a moment
    level.run([gathered, copied, -copied, most, -most, grads * stage.layers - kept - inputs, -gathered])
    if groups.reduces:
        level.reduce()
        level.run(groups.at_once(grads * stage.layers))
    return level.leaving(-kept - inputs)
