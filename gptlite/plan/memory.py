"""Bytes that a rank takes in a training step, before it runs: model state as gptlite.parallelism.memory counts it, and
all else. No torch here: a search asks thousands of times.

Model state is at its most inside the step's last backward pass or at the update; all else (activations, and what ops,
collectives and FSDP2 hold for a while) is walked through in the order of the rank's passes, with each module's tape.
"""

from __future__ import annotations

from dataclasses import dataclass

from gptlite.optimizer.config import AdamConfig, AdamWConfig, SGDConfig
from gptlite.parallelism.config import ActivationCheckpointing
from gptlite.parallelism.layout import num_stages, rule
from gptlite.plan import tape, tape_ends
from gptlite.plan.parameters import Parameter, Stage, fused, padded, stages
from gptlite.plan.tape import MASTER, Sizes
from gptlite.plan.timeline import Pass, order
from gptlite.plan.workload import RankBytes, Workload


def estimate(work: Workload, pp_rank: int, tp_rank: int = 0) -> RankBytes:
    """A pipeline rank's bytes, each category at its most. `tp_rank` matters where the vocabulary is cut unevenly.

    Of data ranks the first is meant, whose shards are the longest.
    """
    held, passes = stages(work, pp_rank, tp_rank), order(work.parallelism, pp_rank, work.micro_batches)
    parameters, gradients, optimizer = _state(work, held, passes)
    return RankBytes(parameters, gradients, optimizer, _activations(work, held, passes, tp_rank))


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
    mine = MASTER * sum(parameter.shard(shards) for parameter in parameters)
    moments, found = _moments(work, parameters), (0, 0)
    gathered = {
        stage.number: work.itemsize * padded(stage.others if zero == 3 else stage.parameters(), shards)
        for stage in held
        if work.layout.data_size > 1
    }
    reduced = {stage.number: MASTER * padded(stage.parameters(), shards) for stage in held}
    if zero >= 2:
        reduced = {number: size // shards for number, size in reduced.items()}
    there: dict[int, int] = {}
    gradients: dict[int, int] = {}
    done = dict.fromkeys(reduced, 0)
    for kind, number, _ in passes:
        if kind == "F":
            there[number] = gathered.get(number, 0)
            continue
        if not (kind == "I" and number == 0):
            found = max(found, (mine + sum(there.values()), sum(gradients.values())), key=sum)
        if kind != "I":
            done[number] += 1
            gradients[number] = reduced[number] if done[number] < count else reduced[number] // _left(work)
            if done[number] == count or zero == 3:
                there[number] = 0
    return *max(found, (mine, mine), key=sum), moments


def _left(work: Workload) -> int:
    """By how much a stage's gradients shrink with the last reduction: ZeRO 1 accumulates them whole."""
    return work.layout.size("dp_shard") if work.parallelism.zero < 2 else 1


def _moments(work: Workload, parameters: list[Parameter]) -> int:
    elements = sum(parameter.shard(work.layout.size("dp_shard")) for parameter in parameters)
    match work.optimizer:
        case AdamWConfig() | AdamConfig():
            return MASTER * (2 * elements + len(parameters))  # and each one's step count
        case SGDConfig(momentum=momentum):
            return MASTER * elements if momentum else 0
    return 2 * MASTER * elements


@dataclass(frozen=True)
class _Pass:
    """A pass, or half of a backward one: the most beyond what was there before, and what it leaves."""

    most: int
    left: int


@dataclass
class _Level:
    """What is there, and the most there was."""

    now: int = 0
    most: int = 0

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
    gradients, whole and a shard's; 0 where it does not. `reduces`: whether every backward pass ends in a reduction."""

    gathered: int
    bucket: int
    others: int
    shards: int
    frees: bool  # gathered buckets are freed after each pass
    reduces: bool
    pairwise: bool
    carried: int  # held from one pass to the next

    @classmethod
    def of(cls, work: Workload, stage: Stage) -> _Groups:
        """Of a stage."""
        shards, data = work.layout.size("dp_shard"), work.layout.data_size
        bucket = padded(stage.block * min(work.parallelism.bucket_layers, stage.layers), shards) if data > 1 else 0
        others = padded(stage.others, shards) if data > 1 else 0
        # Found in pipelines with ZeRO 3: a buffer as large as the other parameters' gradients outlives a pass.
        several = work.parallelism.zero == 3 and work.layout.size("pp") > 1
        return cls(
            gathered=bucket * work.itemsize if shards > 1 else 0,
            bucket=bucket * MASTER,
            others=others * MASTER,
            shards=shards,
            frees=work.parallelism.zero == 3 and shards > 1,
            reduces=work.parallelism.zero >= 2 or work.micro_batches == 1,
            pairwise=work.device == "cpu",
            carried=MASTER * (others or bucket) if several else 0,
        )

    def reduction(self, size: int, grads: int) -> list[int]:
        """From gradients to their shards, which are model state; the whole ones stay until the next reduction."""
        received = size - size // self.shards if self.pairwise and self.shards > 1 else 0
        return [size, -grads, received, -received] if size else []


def _activations(work: Workload, held: list[Stage], passes: list[Pass], tp_rank: int) -> int:
    sizes, level = Sizes.of(work), 0
    taken = {stage.number: _passes(work, stage, sizes, tp_rank) for stage in held}
    numbers = {stage.number for stage in held}
    top = 0
    for kind, number, micro_batch in passes:
        each = taken[number]["first" if kind == "F" and micro_batch == 0 else kind]
        top, level = max(top, level + each.most), level + each.left
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
    numbers, split = {stage.number for stage in held}, rule(work.parallelism).splits_backward
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
    split = work.layout.size("pp") > 1 and rule(work.parallelism).splits_backward
    if split and not stage.first:
        inputs = _inputs(stage, s, groups, ends)
        return {
            "first": first,
            "F": forward,
            "I": inputs,
            "W": _weights(stage, s, groups, ends, forward.left, inputs.left),
        }
    backward = _backward(work, stage, s, groups, ends, forward.left)
    if split:  # of a split backward pass all is done in its second half: nobody wants the gradient of tokens
        return {"first": first, "F": forward, "B": backward, "I": _Pass(0, 0), "W": backward}
    return {"first": first, "F": forward, "B": backward}


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
    if mode is not ActivationCheckpointing.none:
        block = tape.recomputed_forward(s, mode is ActivationCheckpointing.selective)
    if stage.first:
        level.run(tape_ends.embed_forward(s))
    freed = groups.gathered if groups.frees else 0
    level.run([buffer + freed + groups.carried])
    level.repeat(block, stage.layers)
    level.run([-freed])
    if ends is not None:
        level.run(ends.forward)
    level.run([-buffer - groups.carried])
    return level


def _backward(
    work: Workload, stage: Stage, s: Sizes, groups: _Groups, ends: tape_ends.HeadTapes | None, kept: int
) -> _Pass:
    mode, level = work.parallelism.activation_checkpointing, _Level(groups.carried)
    body = {
        ActivationCheckpointing.none: tape.block_backward,
        ActivationCheckpointing.full: tape.full_backward,
        ActivationCheckpointing.selective: tape.selective_backward,
    }[mode]
    gathered = 2 * groups.gathered if groups.frees else 0
    tied = work.model.tied_embeddings and stage.first and stage.last
    if ends is not None:
        level.run(ends.backward)
        if not tied and not s.holds:
            level.run([-ends.gradient])
    grads = sum(parameter.elements for parameter in stage.block) * s.grad if s.holds else 0
    size = groups.bucket // max(1, min(work.parallelism.bucket_layers, stage.layers)) if groups.reduces else 0
    later = [*body(s, True), -size, *groups.reduction(size, grads)]
    first = [*body(s, stage.last), *groups.reduction(size, grads)]
    level.run([gathered])
    level.run([*first, -groups.carried])
    level.repeat(later, stage.layers - 1)
    level.run([-gathered, -size])
    if stage.first:
        positions, table = work.model.sequence_length, stage.others[0].rows
        level.run(tape_ends.embed_backward(s, table, positions, bool(tied)))
    if groups.reduces and groups.others:
        level.run(groups.reduction(groups.others, 0))
    return _Pass(level.most, -kept)


def _inputs(stage: Stage, s: Sizes, groups: _Groups, ends: tape_ends.HeadTapes | None) -> _Pass:
    """The half of a backward pass that computes the gradient of the stage's input, which stays where it came in."""
    level = _Level(groups.carried)
    gathered = groups.gathered * stage.layers if groups.frees else 0
    level.run([gathered])
    if ends is not None:
        level.run([s.slice, s.workspace(s.rows, s.width), -s.workspace(s.rows, s.width)])
    level.repeat(tape.block_inputs(s), stage.layers)
    level.run([-gathered, -s.slice - groups.carried])
    return _Pass(level.most, level.now)


def _weights(
    stage: Stage, s: Sizes, groups: _Groups, ends: tape_ends.HeadTapes | None, kept: int, inputs: int
) -> _Pass:
    """The other half, of the weights, from what the first has left. Gradients are reduced at its end."""
    gathered = groups.gathered * stage.layers if groups.frees else 0
    norm = s.slice + s.workspace(s.rows, s.width)
    gelu = s.inner + s.workspace(s.tokens, s.inner_width) - 2 * s.slice - 6 * s.heads
    head = s.whole + ends.gradient - (kept + inputs) * stage.layers // (stage.layers + 1) if ends is not None else 0
    grads = sum(parameter.elements for parameter in stage.block) * s.grad * stage.layers if s.holds else 0
    level = _Level(groups.carried)
    level.run([gathered, max(norm, gelu, head, 0), -max(norm, gelu, head, 0), grads - kept - inputs])
    level.run([-gathered, *groups.reduction(groups.bucket if groups.reduces else 0, 0), -grads])
    level.run([-groups.carried])
    return _Pass(level.most, -kept - inputs)
