"""What a rank sends and receives in one training step: every collective and message of our engine.

What layers send is the model's profile. What FSDP2 gathers and reduces when: gptlite.parallelism.zero. The pipeline's
messages: gptlite.parallelism.pipeline. What a step sums: trainer.step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from gptlite.models.spec import spec_of
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import num_stages, rule, splits_backward, stages_of_rank, stages_per_rank
from gptlite.plan.parameters import Stage, copies, padded, stages
from gptlite.plan.profile import Sent, halves_of, profile_of
from gptlite.plan.timeline import order
from gptlite.plan.workload import MASTER, Transfer, Workload

SETTLED = 8 * 7  # the step's own sum: loss, squared norm and five words on stopping, in float64
VALID = 8  # the number of valid tokens, int64


@dataclass
class _Sum:
    """Transfers counted by what they are."""

    counts: Counter[tuple[str, str, int, int, str]] = field(default_factory=Counter)

    def add(self, axis: str, kind: str, ranks: int, payload: int, phase: str, count: int = 1) -> None:
        if ranks > 1 and count and payload:
            self.counts[axis, kind, ranks, payload, phase] += count

    def sent(self, sent: Sent, count: int) -> None:
        self.add(sent.axis, sent.kind, sent.ranks, round(sent.payload), sent.phase, count)

    def transfers(self) -> list[Transfer]:
        return [Transfer(*key[:4], count, key[4]) for key, count in sorted(self.counts.items())]


def transfers(work: Workload, pp_rank: int, tp_rank: int = 0) -> list[Transfer]:
    """Every collective and message of one step that a pipeline rank takes part in, equal ones together.

    `tp_rank` matters where the vocabulary does not divide by the tensor axis. Of data ranks the first is meant, whose
    shards are the longest. Compiled blocks gather less under sequence and context parallelism than is counted here.
    """
    found, held = _Sum(), stages(work, pp_rank, tp_rank)
    _outside(found, work, held, reductions(work))
    for stage in held:
        _passes(found, work, stage, tp_rank)
        _pipeline(found, work, stage, pp_rank)
    return found.transfers()


def outside_layers(work: Workload, held: list[Stage]) -> list[Transfer]:
    """Those of `transfers` along the data axes with gradients reduced once, and those that a step makes once."""
    found = _Sum()
    _outside(found, work, held, 1)
    return found.transfers()


def reductions(work: Workload) -> int:
    """How often a step reduces each gradient."""
    return work.micro_batches if work.parallelism.zero >= 2 else 1


def _outside(found: _Sum, work: Workload, held: list[Stage], times: int) -> None:
    for stage in held:
        _data(found, work, stage, times)
        _sliced(found, work, stage)
    _ends(found, work, held)
    for axis in ("dp_replicate", "dp_shard"):
        found.add(axis, "all_reduce", work.layout.size(axis), VALID, "step")
    found.add("world", "all_reduce", work.layout.world_size, SETTLED, "step")


def _passes(found: _Sum, work: Workload, stage: Stage, tp_rank: int) -> None:
    """What the passes of a stage send: along the tensor and the context axis, for each micro-batch."""
    if work.layout.size("tp") * work.layout.context == 1:
        return
    backward = 1
    if splits_backward(work.parallelism) and not stage.first:
        for sent, count in halves_of(work).sent(stage.layers, stage.last).items():
            found.sent(sent, count * work.micro_batches)
        backward = 0
    its = profile_of(work, tp_rank)
    parts = (its.begin, its.begin_back, stage.first), (its.block, its.block_back, stage.layers)
    for there, back, times in (*parts, (its.end, its.end_back, stage.last)):
        for sent in (*there.sent, *back.sent * backward):
            found.sent(sent, times * work.micro_batches)


def _data(found: _Sum, work: Workload, stage: Stage, reduced: int) -> None:
    """Along the data axes: FSDP2's, one for each group of parameters. `reduced`: times that gradients are."""
    if work.layout.fsdp_size == 1:
        return
    shards, copies = work.layout.size("dp_shard"), work.layout.size("dp_replicate")
    for group, number in stage.groups(work.parallelism.bucket_layers):
        elements = padded(group, shards)
        for phase, times in gathered(work, stage.number, group is not stage.others).items():
            found.add("dp_shard", "all_gather", shards, elements * work.gather_item, phase, number * times)
        found.add("dp_shard", "reduce_scatter", shards, elements * work.reduce_item, "backward", number * reduced)
        found.add("dp_replicate", "all_reduce", copies, elements // shards * work.reduce_item, "backward", number)


def gathered(work: Workload, stage: int, block: bool) -> dict[str, int]:
    """How often a group of a stage's parameters is gathered in a step, by phase.

    Through the step, or with ZeRO 3: a block at each pass, freed after it; the others from a forward pass on to the end
    of the next backward pass, which with several micro-batches on their way may be that of an earlier one.
    """
    if work.parallelism.zero < 3:
        return {"forward": 1}
    config = work.parallelism
    rank = stage % config.pipeline
    if config.pipeline > 1 and rule(config).v_shape:
        rank = min(stage, num_stages(config) - 1 - stage)
    counts = _gathers(config.schedule, config.pipeline, stages_per_rank(config), rank, work.micro_batches)
    return dict(zip(("forward", "backward"), counts[stage, block], strict=True))


@lru_cache(maxsize=4096)
def _gathers(
    schedule: str, pipeline: int, virtual: int, rank: int, micro_batches: int
) -> dict[tuple[int, bool], tuple[int, int]]:
    """How often each stage of a rank gathers, forward and backward: its blocks (True) and its other parameters (False).

    The order of a schedule's passes takes long to lay out and is the same for all layouts that run it.
    """
    config = ParallelismConfig(pipeline=pipeline, schedule=schedule, virtual_stages=virtual)
    kinds: dict[int, list[str]] = {stage: [] for stage in stages_of_rank(config, rank)}
    for kind, stage, _ in order(config, rank, micro_batches):
        if kind != "I" or stage > 0:  # nothing to compute: nobody wants the gradient of tokens
            kinds[stage].append(kind)
    counts = {}
    for stage, passes in kinds.items():
        backward = sum(kind != "F" for kind in passes)
        counts[stage, True] = len(passes) - backward, backward  # freed after each pass
        # The others are there from a forward pass to the end of the next backward one.
        fresh = [kind for before, kind in zip(["B", *passes], passes, strict=False) if before != "F"]
        counts[stage, False] = fresh.count("F"), len(fresh) - fresh.count("F")
    return counts


def _pipeline(found: _Sum, work: Workload, stage: Stage, pp_rank: int) -> None:
    """A stage's messages: an activation of each micro-batch goes on, its gradient comes back."""
    config, mine = work.parallelism, stages_of_rank(work.parallelism, pp_rank)
    payload = message_bytes(work)
    for neighbour, (forward, backward) in ((stage.number + 1, ("send", "recv")), (stage.number - 1, ("recv", "send"))):
        if 0 <= neighbour < num_stages(config) and neighbour not in mine:
            found.add("pp", forward, 2, payload, "forward", work.micro_batches)
            found.add("pp", backward, 2, payload, "backward", work.micro_batches)


def message_bytes(work: Workload) -> int:
    """Of what one part of a pipeline gives to the next, of a micro-batch."""
    if work.layout.size("pp") == 1:
        return 0
    between = work.layout.size("tp") if work.parallelism.sequence else 1
    shape = spec_of(work.model).activations(work.model, work.micro_batch_size, work.rank_length // between)
    return prod(shape) * work.stream_item


def _sliced(found: _Sum, work: Workload, stage: Stage) -> None:
    """Gradients that saw a slice of the sequence, all of a stage's in one sum."""
    if work.parallelism.sequence:
        shards, ranks = work.layout.size("dp_shard"), work.layout.size("tp")
        elements = sum(p.shard(shards) for p in stage.parameters() if not p.cut)
        found.add("tp", "all_reduce", ranks, elements * MASTER, "step")


def _ends(found: _Sum, work: Workload, held: list[Stage]) -> None:
    """Gradients of tied parameters, where the first and the last stage are on two ranks."""
    for copy in copies(held) if work.layout.size("pp") > 1 else ():
        payload = copy.shard(work.layout.size("dp_shard")) * MASTER
        found.add("pp", "send", 2, payload, "step")
        found.add("pp", "recv", 2, payload, "step")
