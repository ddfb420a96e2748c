"""Bytes that a rank takes in a training step, before it runs: model state as gptlite.parallelism.memory counts it, and
all else. No torch here: a search asks thousands of times.

Model state is at its most inside the step's last backward pass or at the update; all else (activations, and what ops,
collectives and FSDP2 hold for a while) is walked through in the order of the rank's passes, with each module's tape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gptlite.optimizer.config import (
    BLOCK_8BIT,
    AdafactorConfig,
    AdamConfig,
    AdamW8bitConfig,
    AdamWConfig,
    LionConfig,
    MuonConfig,
    SGDConfig,
    in_8_bits,
)
from gptlite.parallelism.config import ActivationCheckpointing, Offload
from gptlite.parallelism.layout import num_stages, rule, splits_backward
from gptlite.plan import tape, tape_ends
from gptlite.plan.offload import buffers_bytes
from gptlite.plan.parameters import Parameter, Stage, fused, padded, stages
from gptlite.plan.tape import MASTER, Sizes
from gptlite.plan.timeline import Pass, order
from gptlite.plan.workload import RankBytes, Workload

CODES = 256  # numbers that 8 bits stand for, in a table for each of the two moments


def estimate(work: Workload, pp_rank: int, tp_rank: int = 0) -> RankBytes:
    """A pipeline rank's bytes, each category at its most. `tp_rank` matters where the vocabulary is cut unevenly.

    Of data ranks the first is meant, whose shards are the longest.
    """
    held, passes = stages(work, pp_rank, tp_rank), order(work.parallelism, pp_rank, work.micro_batches)
    parameters, gradients, optimizer = _state(work, held, passes)
    host = 0
    if work.on_host:
        shards = work.layout.size("dp_shard")
        host = optimizer + (work.stored + MASTER) * sum(p.shard(shards) for stage in held for p in stage.parameters())
        optimizer = 0
    return RankBytes(parameters, gradients, optimizer, _activations(work, held, passes, tp_rank), host)


def most(work: Workload) -> tuple[int, RankBytes]:
    """The pipeline rank that takes most, and what it takes.

    Of ranks that hold alike the first has most micro-batches on their way, so only that one is asked; in a V all are.
    """
    first: dict[object, int] = {}
    alike = not rule(work.parallelism).v_shape
    for rank in range(work.layout.size("pp")):
        held = tuple((stage.layers, stage.first, stage.last) for stage in stages(work, rank))
        first.setdefault(held if alike else rank, rank)
    each = {rank: estimate(work, rank) for rank in first.values()}
    rank = max(each, key=lambda one: each[one].total)
    return rank, each[rank]


def zero_paper_bytes(parameters: float, ranks: int, stage: int) -> float:
    """The ZeRO paper's count (arXiv:1910.02054, section 3): 16-bit parameters and gradients and 12 bytes for Adam."""
    divided = {0: 0, 1: 12, 2: 14, 3: 16}[stage]
    return parameters * (16 - divided + divided / ranks)


def _state(work: Workload, held: list[Stage], passes: list[Pass]) -> tuple[int, int, int]:
    """Parameters, gradients and the optimizer's state, at the instant when their sum is most: where a backward pass
    begins, or at the update."""
    shards, zero, count = work.layout.size("dp_shard"), work.parallelism.zero, work.micro_batches
    parameters = [parameter for stage in held for parameter in stage.parameters()]
    elements = 0 if work.on_host else sum(parameter.shard(shards) for parameter in parameters)
    mine, updating = work.stored * elements, MASTER * elements
    moments, found = _moments(work, held), (0, 0)
    gathered = {
        stage.number: work.gather_item * padded(stage.others if zero == 3 else stage.parameters(), shards)
        for stage in held
        if work.sharded
    }
    reduced = {stage.number: MASTER * padded(stage.parameters(), shards) for stage in held}
    if zero >= 2:
        reduced = {number: 0 if work.on_host else size // shards for number, size in reduced.items()}
    there: dict[int, int] = {}
    gradients: dict[int, int] = {}
    done = dict.fromkeys(reduced, 0)
    for kind, number, _ in passes:
        begins = kind == "B" or (kind == "I") == (number > 0)  # of a split pass at the model's end the W half is all
        if kind == "F" or (zero == 3 and begins):
            there[number] = gathered.get(number, 0)
        if kind == "F":
            continue
        works = begins or kind == "W"
        if works:
            found = max(found, (mine + sum(there.values()), sum(gradients.values())), key=sum)
        if kind != "I":
            done[number] += 1
            left = 0 if work.on_host else reduced[number] // _left(work)
            gradients[number] = reduced[number] if done[number] < count else left
        if done[number] == count or (zero == 3 and works):
            there[number] = 0
    return *max(found, (mine, updating), key=sum), moments


def _left(work: Workload) -> int:
    """By how much a stage's gradients shrink with the last reduction: ZeRO 1 accumulates them whole."""
    return work.layout.size("dp_shard") if work.parallelism.zero < 2 else 1


def _moments(work: Workload, held: list[Stage]) -> int:
    """All in fp32, a count of steps too, which each parameter has but for Lion, SGD and Muon's matrices."""
    shards = work.layout.size("dp_shard")
    parameters = [parameter for stage in held for parameter in stage.parameters()]
    elements = sum(parameter.shard(shards) for parameter in parameters)
    if work.parallelism.offload is Offload.nvme:
        counts = MASTER * len(parameters) * isinstance(work.optimizer, AdamWConfig | AdamConfig)
        return buffers_bytes(work, parameters) + counts
    match work.optimizer:
        case SGDConfig(momentum=momentum):
            return MASTER * elements if momentum else 0
        case LionConfig():
            return MASTER * elements
        case AdamW8bitConfig():
            return sum(_in_8_bits(parameter.shard(shards)) for parameter in parameters) + 2 * MASTER * CODES
        case MuonConfig():
            matrices = [each for stage in held for each in stage.block * stage.layers if each.width > 1]
            alone = sum(matrix.shard(shards) for matrix in matrices)
            return MASTER * (2 * elements - alone + len(parameters) - len(matrices))
        case AdafactorConfig():
            return MASTER * sum(1 + _factors(parameter, shards) for parameter in parameters)
    return MASTER * (2 * elements + len(parameters))  # Adam's two, and LAMB's


def _in_8_bits(elements: int) -> int:
    """Two moments, a byte an element and a scale a block, or in fp32 where they are; and a count of steps."""
    moment = elements + MASTER * elements // BLOCK_8BIT if in_8_bits(elements) else MASTER * elements
    return 2 * moment + MASTER


def _factors(parameter: Parameter, shards: int) -> int:
    """A matrix has a mean for each row and for each column, a vector (a column of rows) for each element."""
    rows = parameter.shard(shards) // parameter.width
    return rows + parameter.width if parameter.width > 1 else rows


@dataclass(frozen=True)
class _Pass:
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

    def leaving(self, size: int) -> _Pass:
        """All of it, as a pass that leaves `size`."""
        return _Pass(self.most, size) if self.before is None else _Pass(self.before, size, self.most)

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
class _Groups:
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
    shards: int
    frees: bool  # gathered buckets are freed after each pass
    reduces: bool
    pairwise: bool

    @classmethod
    def of(cls, work: Workload, stage: Stage, final: bool = False) -> _Groups:
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
            bucket=elements(stage.block * blocks) * MASTER,
            last_bucket=elements(stage.block * last) * MASTER,
            others=elements(stage.others) * MASTER,
            shards=shards,
            frees=work.parallelism.zero == 3 and comes_and_goes,
            reduces=work.sharded and (final or work.parallelism.zero >= 2 or work.micro_batches == 1),
            pairwise=work.device == "cpu",
        )

    def reduction(self, size: int, grads: int) -> list[int]:
        """From gradients to their shards, which are model state; the whole ones stay until the next reduction."""
        received = size - size // self.shards if self.pairwise and self.shards > 1 else 0
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


def _activations(work: Workload, held: list[Stage], passes: list[Pass], tp_rank: int) -> int:
    """The most that the passes of a step take at once. `there`: what each stage's last reduction has left; `left`: the
    backward passes that each stage has before it."""
    sizes, level = Sizes.of(work), 0
    taken = {stage.number: _passes(work, stage, sizes, tp_rank) for stage in held}
    carried = {
        stage.number: _Groups.of(work, stage, final=True).carried(splits_backward(work.parallelism)) for stage in held
    }
    numbers = {stage.number for stage in held}
    there, left = dict.fromkeys(numbers, 0), dict.fromkeys(numbers, work.micro_batches)
    top = 0
    for kind, number, micro_batch in passes:
        left[number] -= kind in "BW"
        name = "first" if kind == "F" and micro_batch == 0 else kind if left[number] or kind in "FI" else f"last {kind}"
        each = taken[number][name]
        top = max(top, level + each.most)
        if each.reducing is not None:
            top, level = max(top, level - there[number] + each.reducing), level - there[number]
            there[number] = carried[number] if left[number] else 0
            level += there[number]
        level += each.left
        level += _messages(work, kind, number, numbers) * sizes.slice
    ends = [stage for stage in held if stage.first or stage.last]
    if work.layout.size("pp") > 1 and work.model.tied_embeddings and len(ends) == 1:
        table = ends[0].others[0 if ends[0].first else -1]
        top = max(top, 2 * table.shard(work.layout.size("dp_shard")) * MASTER)
    return top + _buffers(work, held, sizes)


def _messages(work: Workload, kind: str, number: int, mine: set[int]) -> int:
    """By how many activations more or less than a pass leaves are there after it, because of what is sent on.

    Schedules of several stages a rank wait for what they send at the end of a step. A stage that follows one of the
    same rank takes its output for the buffer that `_buffers` counts.
    """
    if work.layout.size("pp") == 1:
        return 0
    onwards, backwards = number + 1 < num_stages(work.parallelism), number > 0
    if number + 1 in mine:
        return {"F": -1, "B": 1, "W": 1}.get(kind, 0)
    if work.parallelism.schedule in ("gpipe", "1f1b") or kind in "FI":
        return 0
    # A split backward pass leaves its input's gradient in any case.
    return onwards + (backwards and kind == "B" and number - 1 not in mine)


def _buffers(work: Workload, held: list[Stage], sizes: Sizes) -> int:
    """What a pipeline's stages keep to receive into, a tensor a micro-batch; and the step's tokens and targets."""
    if work.layout.size("pp") == 1:
        return 0
    numbers, split = {stage.number for stage in held}, splits_backward(work.parallelism)
    count = sum(not stage.first for stage in held) + sum(not stage.last for stage in held)
    # A split backward pass leaves its inputs' gradients to the end of the step, a stage after this rank's own too.
    count += sum(not stage.first and stage.number - 1 not in numbers for stage in held) if split else 0
    batches = work.micro_batches * sizes.tokens * tape.INDEX
    return work.micro_batches * count * sizes.slice + batches * (1 + (0 in numbers))


def _passes(work: Workload, stage: Stage, s: Sizes, tp_rank: int) -> dict[str, _Pass]:
    groups = _Groups.of(work, stage)
    reference = not fused(work) and s.tensor == 1
    ends = tape_ends.head(s, work, tp_rank, reference) if stage.last else None
    first, forward = _forward(work, stage, s, groups, ends)
    found = {"first": first, "F": forward}
    final = _Groups.of(work, stage, final=True)
    for name, its in (("", groups), ("last ", final)):
        if name and final == groups:
            found |= {name + kind: found[kind] for kind in "BW" if kind in found}
            continue
        if splits_backward(work.parallelism) and not stage.first:
            inputs = _inputs(stage, s, its, ends)
            found |= {"I": inputs, f"{name}W": _weights(stage, s, its, ends, forward.left, inputs.left)}
        else:  # of a split backward pass all is done in its second half: nobody wants the gradient of tokens
            whole = _backward(work, stage, s, its, ends, forward.left)
            found |= {f"{name}B": whole, f"{name}W": whole, "I": _Pass(0, 0)}
    return found


def _forward(
    work: Workload, stage: Stage, s: Sizes, groups: _Groups, ends: tape_ends.HeadTapes | None
) -> tuple[_Pass, _Pass]:
    """The first forward pass of a step, and any other."""
    later = _forward_level(work, stage, s, groups, ends, groups.gathered if groups.frees else 0)
    if groups.frees or not groups.gathered:
        return _Pass(later.most, later.now), _Pass(later.most, later.now)
    # Parameters that stay are gathered in the first pass, whose gradients are the first, and so model state.
    first = _forward_level(work, stage, s, groups, ends, groups.gathered)
    owned = ends.gradient if ends is not None and not s.holds else 0
    return _Pass(first.most - owned, later.now), _Pass(later.most, later.now)


def _forward_level(
    work: Workload, stage: Stage, s: Sizes, groups: _Groups, ends: tape_ends.HeadTapes | None, buffer: int
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
    work: Workload, stage: Stage, s: Sizes, groups: _Groups, ends: tape_ends.HeadTapes | None, kept: int
) -> _Pass:
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


def _inputs(stage: Stage, s: Sizes, groups: _Groups, ends: tape_ends.HeadTapes | None) -> _Pass:
    """The half of a backward pass that computes the gradient of the stage's input."""
    level = _Level()
    gathered = groups.gathered * groups.buckets if groups.frees else 0
    level.run([gathered])
    if ends is not None:
        level.run([s.slice, s.workspace(s.rows, s.width), -s.workspace(s.rows, s.width)])
    level.repeat(tape.block_inputs(s), stage.layers)
    level.run([-gathered])
    return level.leaving(level.now)


def _weights(
    stage: Stage, s: Sizes, groups: _Groups, ends: tape_ends.HeadTapes | None, kept: int, inputs: int
) -> _Pass:
    """The other half, of the weights, from what the first has left. Gradients are reduced at its end."""
    gathered = (groups.gathered * groups.buckets + groups.others // MASTER * s.item) if groups.frees else 0
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
