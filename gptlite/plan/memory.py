"""Bytes that a rank takes in a training step, before it runs: model state as gptlite.parallelism.memory counts it, and
all else. No torch here: a search asks thousands of times.

Model state is at its most inside the step's last backward pass or at the update; all else (activations, and what ops,
collectives and FSDP2 hold for a while) is walked through in the order of the rank's passes, with each module's tape.
"""

from __future__ import annotations

from gptlite.parallelism.layout import num_stages, rule, splits_backward
from gptlite.plan import tape
from gptlite.plan.moments import moments_bytes
from gptlite.plan.parameters import Stage, padded, stages
from gptlite.plan.passes import Groups, passes_of
from gptlite.plan.tape import MASTER, Sizes
from gptlite.plan.timeline import Pass, order
from gptlite.plan.workload import RankBytes, Workload


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
    moments, found = moments_bytes(work, held), (0, 0)
    gathered = {
        stage.number: work.gather_item * padded(stage.others if zero == 3 else stage.parameters(), shards)
        for stage in held
        if work.sharded
    }
    sizes = {stage.number: MASTER * padded(stage.parameters(), shards) for stage in held}
    reduced = {number: size * work.reduce_item // MASTER for number, size in sizes.items()}
    if zero >= 2 and work.layout.size("dp_replicate") > 1:  # sums of a part of the ranks, in the dtype they are made in
        reduced = {number: size // shards for number, size in reduced.items()}
    elif zero >= 2:
        reduced = {number: 0 if work.on_host else size // shards for number, size in sizes.items()}
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
            left = 0 if work.on_host else sizes[number] // shards
            gradients[number] = reduced[number] if done[number] < count else left
        if done[number] == count or (zero == 3 and works):
            there[number] = 0
    return *max(found, (mine, updating), key=sum), moments


def _activations(work: Workload, held: list[Stage], passes: list[Pass], tp_rank: int) -> int:
    """The most that the passes of a step take at once. `there`: what each stage's last reduction has left; `left`: the
    backward passes that each stage has before it."""
    sizes, level = Sizes.of(work), 0
    taken = {stage.number: passes_of(work, stage, sizes, tp_rank) for stage in held}
    carried = {
        stage.number: Groups.of(work, stage, final=True).carried(splits_backward(work.parallelism)) for stage in held
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
