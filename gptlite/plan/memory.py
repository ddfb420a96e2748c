"""Bytes that a rank takes in a training step, before it runs: model state as gptlite.parallelism.memory counts it, and
all else.

Model state is at its most inside the step's last backward pass or at the update; all else (activations, and what ops,
collectives and FSDP2 hold for a while) is walked through in the order of the rank's passes, as the model's profile has
each.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from operator import add

from gptlite.parallelism.layout import num_stages, rule, splits_backward
from gptlite.plan.moments import moments_bytes
from gptlite.plan.parameters import Stage, copies, cut, stages
from gptlite.plan.passes import Groups, Taken, passes_of
from gptlite.plan.traffic import message_bytes
from gptlite.plan.walk import NAMES, codes, states
from gptlite.plan.workload import MASTER, RankBytes, Workload

INDEX = 8  # bytes of a token's number
# By what a stage's passes depend on: the most that each takes, by walk.NAMES, and by how much it changes what is there.
Shared = dict[tuple[object, ...], list[tuple[int, int]]]


def estimate(work: Workload, pp_rank: int, tp_rank: int = 0) -> RankBytes:
    """A pipeline rank's bytes, each category at its most. `tp_rank` matters where the vocabulary is cut unevenly.

    Of data ranks the first is meant, whose shards are the longest.
    """
    return _estimate(work, pp_rank, tp_rank, {})


def most(work: Workload, shared: Shared | None = None) -> tuple[int, RankBytes]:
    """The pipeline rank that takes most, and what it takes.

    Of ranks that hold alike the first has most micro-batches on their way, so only that one is asked; in a V all are.
    `shared`: what the layouts of one search have in common; it must be of one model, dtype and cluster.
    """
    ranks: Iterable[int] = range(work.layout.size("pp"))
    if not rule(work.parallelism).v_shape:
        ranks = cut(work).first.values()
    known: Shared = {} if shared is None else shared
    each = {rank: _estimate(work, rank, 0, known) for rank in ranks}
    rank = max(each, key=lambda one: each[one].total)
    return rank, each[rank]


def _estimate(work: Workload, pp_rank: int, tp_rank: int, shared: Shared) -> RankBytes:
    held, host = stages(work, pp_rank, tp_rank), 0
    parameters, gradients, optimizer = _state(work, held, pp_rank)
    if work.on_host:
        shards = work.layout.size("dp_shard")
        host = optimizer + (work.stored + MASTER) * sum(stage.sharded(shards) for stage in held)
        optimizer = 0
    activations = _activations(work, held, (pp_rank, tp_rank), shared)
    return RankBytes(parameters, gradients, optimizer, activations, host)


def _state(work: Workload, held: list[Stage], pp_rank: int) -> tuple[int, int, int]:
    """Parameters, gradients and the optimizer's state, at the instant when their sum is most: where a backward pass
    begins, or at the update."""
    shards, zero, count = work.layout.size("dp_shard"), work.parallelism.zero, work.micro_batches
    sizes = [MASTER * stage.sharded(shards) for stage in held]  # of the gradients of a rank's shards
    elements = 0 if work.on_host else sum(sizes) // MASTER
    mine, updating = work.stored * elements, MASTER * elements
    gathered = [
        work.gather_item * shards * (stage.sharded(shards, others=zero == 3) if work.sharded else 0) for stage in held
    ]
    done = [0 if work.on_host else size for size in sizes]
    if zero < 2:
        reduced = [work.reduce_item * stage.sharded(1) for stage in held]
    elif work.layout.size("dp_replicate") > 1:  # sums of a part of the ranks, in the dtype they are made in
        reduced = [size * work.reduce_item // MASTER for size in sizes]
    else:
        reduced = done
    found: tuple[int, int] = (0, 0)
    for its in states(work.parallelism, pp_rank, count, zero == 3):
        gradients = sum(reduced[place] for place in its.reduced) + sum(done[place] for place in its.done)
        found = max(found, (mine + sum(gathered[place] for place in its.gathered), gradients), key=sum)
    parameters, gradients = max(found, (mine, updating), key=sum)
    return parameters, gradients, moments_bytes(work, held)


def _activations(work: Workload, held: list[Stage], rank: tuple[int, int], shared: Shared) -> int:
    """The most that the passes of a step take at once. `rank`: of the pipeline, and of the tensor axis."""
    numbers, (pp_rank, tp_rank) = {stage.number for stage in held}, rank
    read, message = _read(work), message_bytes(work)
    peaks, changes = list[int](), list[int]()
    for stage in held:
        key = (stage.layers, stage.first, stage.last, tp_rank, *read)
        if key not in shared:
            shared[key] = _passes(work, stage, tp_rank)
        sent = {kind: _messages(work, kind, stage.number, numbers) * message for kind in "FIBW"}
        peaks += [peak for peak, _ in shared[key]]
        changes += [change + sent[name[-1]] for name, (_, change) in zip(NAMES, shared[key], strict=True)]
    passes = codes(work.parallelism, pp_rank, work.micro_batches)
    levels = accumulate(map(changes.__getitem__, passes), initial=0)
    top = max(0, *map(add, levels, map(peaks.__getitem__, passes)))
    for copy in copies(held):
        top = max(top, 2 * copy.shard(work.layout.size("dp_shard")) * MASTER)
    return top + _buffers(work, held, message)


def _read(work: Workload) -> tuple[object, ...]:
    """What `_passes` reads of a layout, beside the stage."""
    config, layout = work.parallelism, work.layout
    degrees = layout.size("tp"), layout.context, layout.size("dp_shard"), work.sharded
    how = config.zero, config.sequence, config.activation_checkpointing, splits_backward(config)
    return *degrees, *how, work.micro_batch_size, work.micro_batches == 1


def _passes(work: Workload, stage: Stage, tp_rank: int) -> list[tuple[int, int]]:
    """Each kind of pass of a stage: the most that it takes beyond what was there, and by how much it changes that."""
    carried = Groups.of(work, stage).carried(splits_backward(work.parallelism))
    taken = passes_of(work, stage, tp_rank)
    return [_pass(taken, name, carried) for name in NAMES]


def _pass(taken: dict[str, Taken], name: str, carried: int) -> tuple[int, int]:
    """One of them. `carried`: what a reduction leaves until the stage's next one begins."""
    when, _, kind = name.rpartition(" ")
    last = kind != "F" and when in ("last", "only")
    each = taken.get("first" if name == "first F" else f"last {kind}" if last else kind)
    if each is None:  # the schedule has no such passes
        return 0, 0
    if each.reducing is None:
        return each.most, each.left
    before = 0 if when in ("first", "only") else carried
    return max(each.most, each.reducing - before), each.left + (0 if last else carried) - before


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


def _buffers(work: Workload, held: list[Stage], message: int) -> int:
    """What a pipeline's stages keep to receive into, a tensor a micro-batch; and the step's tokens and targets."""
    if work.layout.size("pp") == 1:
        return 0
    numbers, split = {stage.number for stage in held}, splits_backward(work.parallelism)
    count = sum(not stage.first for stage in held) + sum(not stage.last for stage in held)
    # A split backward pass leaves its inputs' gradients to the end of the step, a stage after this rank's own too.
    count += sum(not stage.first and stage.number - 1 not in numbers for stage in held) if split else 0
    batches = work.micro_batches * work.rank_tokens * INDEX
    return (work.micro_batches * count + _sent(work, held)) * message + batches * (1 + (0 in numbers))


def _sent(work: Workload, held: list[Stage]) -> int:
    """Messages that 1F1B keeps in its steady phase, though they have been sent: an output and a gradient."""
    (stage, *others) = held
    if others or work.parallelism.schedule != "1f1b":
        return 0
    warm_up = work.layout.size("pp") - stage.number
    return (work.micro_batches > warm_up) * ((not stage.first) + (not stage.last))
