"""Bytes that a rank needs in a training step, predicted without running it.

Model state is counted as gptlite.parallelism.memory counts it, and peaks inside the step's last backward pass or at the
update. All else (activations and temporary memory of ops, collectives and FSDP2) is accumulated over the rank's passes
in order, with the events of each from the model's profile.
"""

from __future__ import annotations

import numpy as np

from gptlite.optimizer.config import Shard
from gptlite.parallelism.config import Offload
from gptlite.parallelism.layout import num_stages, rule, splits_backward
from gptlite.plan.offload import buffers_bytes
from gptlite.plan.parameters import Stage, copies, cut, shard_elements, stages
from gptlite.plan.passes import passes_of
from gptlite.plan.traffic import message_bytes
from gptlite.plan.walk import Turn, turns
from gptlite.plan.workload import MASTER, RankBytes, Workload

INDEX = 8  # bytes of a token id, int64


def most(work: Workload) -> tuple[int, RankBytes]:
    """Return the pipeline rank that needs the most memory, and its bytes.

    Of ranks with the same layers the first has the most micro-batches in flight, so only it is estimated; with a
    V-shaped schedule all are.
    """
    v_shape = rule(work.parallelism).v_shape
    ranks = range(work.layout.size("pp")) if v_shape else cut(work).first.values()
    each = {rank: estimate(work, rank) for rank in ranks}
    rank = max(each, key=lambda one: each[one].total)
    return rank, each[rank]


def estimate(work: Workload, pp_rank: int, tp_rank: int = 0) -> RankBytes:
    """Return a pipeline rank's bytes, each category at its peak. `tp_rank` matters if the vocabulary is cut unevenly.

    The estimate is for the first data rank, whose shards are the longest.
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
    """Return parameters and gradients at the instant when their sum peaks, at the start of a backward pass or at the
    update, and the peak of all else. All are accumulated over the rank's passes in order."""
    message, numbers = message_bytes(work), {stage.number for stage in held}
    passes, states = [passes_of(work, stage, tp_rank) for stage in held], [ModelState(work, stage) for stage in held]
    different, order = turns(work.parallelism, pp_rank, work.micro_batches)
    rows = []
    for turn in different:
        peak, change = passes[turn.place][turn.kind, turn.first, turn.last]
        change += message * _messages(work, turn.kind, held[turn.place].number, numbers)
        rows.append((peak, change, *states[turn.place].changes(turn), turn.kind != "F"))
    peaks, changes, gathered, freed, summed, backward = np.array(rows)[order].T
    before, partial, reduced = (np.cumsum(each) - each for each in (changes, gathered - freed, summed))
    unsharded = partial + gathered
    at = np.argmax(np.where(backward, unsharded + reduced, -1))
    elements = 0 if work.on_host else sum(stage.sharded(work.layout.size("dp_shard")) for stage in held)
    inside = work.stored * elements + int(unsharded[at]), int(reduced[at])
    parameters, gradients = max(inside, (work.stored * elements, MASTER * elements), key=sum)
    # The sums of tied parameters' gradients, where two ranks have a copy.
    tied = [2 * copy.shard(work.layout.size("dp_shard")) * MASTER for copy in copies(held)]
    top = max(0, int((before + peaks).max()), *tied)
    return parameters, gradients, top + _buffers(work, held, message)


class ModelState:
    """Changes of a stage's model state beside its shards, in bytes: `gathered` parameters and the gradients that are
    accumulated, `reduced` of some micro-batches and `done` of all."""

    def __init__(self, work: Workload, stage: Stage) -> None:
        shards, zero = work.layout.size("dp_shard"), work.parallelism.zero
        size = MASTER * stage.sharded(shards)
        whole = shard_elements(stage.others, shards) if zero == 3 else stage.sharded(shards)
        self.gathered = work.gather_item * shards * whole * work.sharded
        self.done = 0 if work.on_host else size  # offload moves reduced gradients to the host
        self.reduced, self.frees, self.first = self.done, zero == 3, stage.first
        if zero < 2:
            self.reduced = work.reduce_item * stage.sharded(1)
        elif work.layout.size("dp_replicate") > 1:  # sums of a part of the ranks, in the dtype they are made in
            self.reduced = size * work.reduce_item // MASTER

    def changes(self, turn: Turn) -> tuple[int, int, int]:
        """Return the parameters that a pass gathers, those that it frees at its end, and its change of gradients."""
        if self.frees:  # the second half of a backward pass only frees what a forward pass has gathered
            half = turn.kind == "W" and not self.first
            gathers, frees = turn.fresh and not half, turn.kind != "F" and not (half and turn.fresh)
        else:
            gathers, frees = turn.kind == "F" and turn.first, turn.last
        first = turn.first and turn.kind != "F"
        summed = self.done - self.reduced * (not first) if turn.last else self.reduced * first
        return self.gathered * gathers, self.gathered * frees, summed


def _optimizer(work: Workload, held: list[Stage]) -> int:
    """Return the bytes of the optimizer's state; if the state is in files, those of its buffers and step counts."""
    if work.parallelism.offload is Offload.nvme:
        parameters = [parameter for stage in held for parameter in stage.parameters()]
        return buffers_bytes(work, parameters) + MASTER * len(parameters) * work.optimizer.counts
    shards = work.layout.size("dp_shard")
    kinds = [(stage.others, False, 1) for stage in held] + [(stage.block, True, stage.layers) for stage in held]
    return work.optimizer.state_bytes(
        [Shard(each.shard(shards), each.width, inside, count) for group, inside, count in kinds for each in group]
    )


def _messages(work: Workload, kind: str, number: int, mine: set[int]) -> int:
    """Return how many activations more than recorded remain after a pass, or fewer, because its output is sent on.

    Schedules with several stages per rank wait for their sends at the end of a step. A stage that follows one of the
    same rank uses that stage's output as the receive buffer that `_buffers` counts.
    """
    if work.layout.size("pp") == 1:
        return 0
    onwards, backwards = number + 1 < num_stages(work.parallelism), number > 0
    if number + 1 in mine:
        return {"F": -1, "B": 1, "W": 1}.get(kind, 0)
    if work.parallelism.schedule in ("gpipe", "1f1b") or kind in "FI":
        return 0
    # A split backward pass keeps its input's gradient in any case.
    return onwards + (backwards and kind == "B" and number - 1 not in mine)


def _buffers(work: Workload, held: list[Stage], message: int) -> int:
    """Return the bytes of a pipeline's receive buffers, a tensor per micro-batch, and of the step's tokens and
    targets."""
    ranks, count = work.layout.size("pp"), work.micro_batches
    if ranks == 1:
        return 0
    numbers, split = {stage.number for stage in held}, splits_backward(work.parallelism)
    kept = count * (sum(not stage.first for stage in held) + sum(not stage.last for stage in held))
    if split:  # keeps its inputs' gradients to the end of the step, also for a stage that follows another rank's
        kept += count * sum(not stage.first and stage.number - 1 not in numbers for stage in held)
    if work.parallelism.schedule == "1f1b" and count > ranks - held[0].number:
        # In its steady phase an output and a gradient, though they have been sent.
        kept += (not held[0].first) + (not held[0].last)
    return kept * message + count * work.rank_tokens * INDEX * (1 + (0 in numbers))
