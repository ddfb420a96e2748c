"""What a rank sends and receives in one training step: every collective and message of our engine. No torch here.

Which layer communicates what: gptlite.parallelism.tensor, gptlite.ops.cross_entropy. What FSDP2 gathers and reduces
when: gptlite.parallelism.zero. The pipeline's messages: gptlite.parallelism.pipeline. What a step sums: trainer.step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

from gptlite.models.gpt.config import Activation
from gptlite.ops.config import logit_rows
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import num_stages, rule, splits_backward, stages_of_rank, stages_per_rank
from gptlite.plan.parameters import Stage, fused, padded, stages
from gptlite.plan.timeline import order
from gptlite.plan.workload import Transfer, Workload

MASTER = 4  # bytes of a number of a sharded gradient, and of a parameter that nobody has cast
SETTLED = 8 * 7  # the step's own sum: loss, squared norm and five words on stopping, in float64
VALID = 8  # the number of valid tokens, int64
TERMS = 3 * 4  # what ranks that share a vocabulary exchange of a token: three floats


@dataclass
class _Sum:
    """Transfers counted by what they are."""

    counts: Counter[tuple[str, str, int, int, str]] = field(default_factory=Counter)

    def add(self, axis: str, kind: str, ranks: int, payload: int, phase: str, count: int = 1) -> None:
        if ranks > 1 and count and payload:
            self.counts[axis, kind, ranks, payload, phase] += count

    def transfers(self) -> list[Transfer]:
        return [Transfer(*key[:4], count, key[4]) for key, count in sorted(self.counts.items())]


def transfers(work: Workload, pp_rank: int, tp_rank: int = 0) -> list[Transfer]:
    """Every collective and message of one step that a pipeline rank takes part in, equal ones together.

    `tp_rank` matters where the vocabulary does not divide by the tensor axis. Of data ranks the first is meant, whose
    shards are the longest. Compiled blocks gather less under sequence and context parallelism than is counted here.
    """
    found, held = _Sum(), stages(work, pp_rank, tp_rank)
    _inside(found, work, held)
    _outside(found, work, held)
    for stage in held:
        _pipeline(found, work, stage, pp_rank)
    return found.transfers()


def inside_layers(work: Workload, held: list[Stage]) -> list[Transfer]:
    """Those of `transfers` that passes wait for inside of their layers: along the tensor and the context axis."""
    found = _Sum()
    _inside(found, work, held)
    return found.transfers()


def outside_layers(work: Workload, held: list[Stage]) -> list[Transfer]:
    """Those of `transfers` along the data axes, and those that a step makes once."""
    found = _Sum()
    _outside(found, work, held)
    return found.transfers()


def _inside(found: _Sum, work: Workload, held: list[Stage]) -> None:
    for stage in held:
        _tensor(found, work, stage)
        _context(found, work, stage)


def _outside(found: _Sum, work: Workload, held: list[Stage]) -> None:
    for stage in held:
        _data(found, work, stage)
        _sliced(found, work, stage)
    _ends(found, work, held)
    for axis in ("dp_replicate", "dp_shard"):
        found.add(axis, "all_reduce", work.layout.size(axis), VALID, "step")
    found.add("world", "all_reduce", work.layout.world_size, SETTLED, "step")


def _tensor(found: _Sum, work: Workload, stage: Stage) -> None:
    """Along the tensor axis, for each micro-batch.

    Without sequence parallelism each sum is an all-reduce, forward after row-parallel layers and backward before
    column-parallel ones; with it a sum is a reduce-scatter and its other direction an all-gather.
    """
    ranks, config = work.layout.size("tp"), work.parallelism
    if ranks == 1:
        return
    count, layers = work.micro_batches, stage.layers
    tokens = work.rank_tokens
    between = tokens * work.model.d_model * work.itemsize
    # The table is looked up as it is, where no FSDP2 casts it.
    embedded = tokens * work.model.d_model * (work.gather_item if work.sharded else work.stored)
    split = splits_backward(config)
    again = _recomputed(work, stage, split)
    summed = "reduce_scatter" if config.sequence else "all_reduce"
    if stage.first:
        found.add("tp", summed, ranks, embedded, "forward", count)
    found.add("tp", summed, ranks, between, "forward", 2 * layers * count)
    found.add("tp", summed, ranks, between, "backward", (2 * layers + stage.last) * count)
    found.add("tp", summed, ranks, between, "backward", again.sums * count)
    if config.sequence:
        entered = 2 * layers + stage.last
        found.add("tp", "all_gather", ranks, between, "forward", entered * count)
        # Row-parallel layers gather the gradient, column-parallel ones their input once more, while that is computed.
        found.add("tp", "all_gather", ranks, between, "backward", (2 * layers + again.gathers) * count)
        found.add("tp", "all_gather", ranks, between, "backward", 0 if split else 2 * layers * count)
        if stage.first:
            found.add("tp", "all_gather", ranks, embedded, "backward", count)
    if stage.last:
        for rows, chunks in _chunks(work, tokens):
            found.add("tp", "all_gather", ranks, ranks * rows * TERMS, "forward", chunks * count)


def _context(found: _Sum, work: Workload, stage: Stage) -> None:
    """Among the ranks that share sequences, for each micro-batch and block: keys and values, and their gradients.

    They are gathered again for the backward pass, alone or with the block that is computed again.
    """
    ranks, count = work.layout.context, work.micro_batches * stage.layers
    tokens = work.micro_batch_size * work.sequence_length
    payload = 2 * tokens * work.model.d_model // work.layout.size("tp") * work.itemsize
    again = _recomputed(work, stage, splits_backward(work.parallelism)).gathers // 2 * work.micro_batches
    found.add("cp", "all_gather", ranks, payload, "forward", count)
    found.add("cp", "all_gather", ranks, payload, "backward", again or count)
    found.add("cp", "reduce_scatter", ranks, payload, "backward", count)


@dataclass(frozen=True)
class _Again:
    """Collectives of a micro-batch's blocks that activation checkpointing runs once more."""

    sums: int
    gathers: int


def _recomputed(work: Workload, stage: Stage, split: bool) -> _Again:
    config = work.parallelism
    if not config.activation_checkpointing.recomputes:
        return _Again(0, 0)
    # Recomputation ends with the last tensor that the backward pass wants: the MLP's sum comes after it, but for
    # dropout, which keeps its key.
    sums = 2 if work.model.dropout else 1
    times = stage.layers
    if split and not stage.first:
        # Once for the gradients of the inputs, then for each layer with weights that wants what was computed: two
        # norms, four matrices and, where one kernel adds the bias and computes the GELU, that.
        gelu = fused(work) and work.model.bias and work.model.activation is not Activation.relu
        times *= 1 + 6 + gelu
    return _Again(sums * times, 2 * times)


def _chunks(work: Workload, tokens: int) -> list[tuple[int, int]]:
    """Tokens whose logits exist at a time, and how often there are so many."""
    longest = -(-work.model.padded_vocab_size // work.layout.size("tp"))
    rows = logit_rows(work.device, tokens, longest, work.itemsize)
    whole, rest = divmod(tokens, rows)
    return [(rows, whole)] * bool(whole) + [(rest, 1)] * bool(rest)


def _data(found: _Sum, work: Workload, stage: Stage) -> None:
    """Along the data axes: FSDP2's, one for each group of parameters."""
    if work.layout.fsdp_size == 1:
        return
    shards, copies = work.layout.size("dp_shard"), work.layout.size("dp_replicate")
    for group, number in stage.groups(work.parallelism.bucket_layers):
        elements = padded(group, shards)
        for phase, times in gathered(work, stage.number, group is not stage.others).items():
            found.add("dp_shard", "all_gather", shards, elements * work.gather_item, phase, number * times)
        reductions = work.micro_batches if work.parallelism.zero >= 2 else 1
        found.add("dp_shard", "reduce_scatter", shards, elements * work.reduce_item, "backward", number * reductions)
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
    between = work.layout.size("tp") if config.sequence else 1
    length = work.rank_length // between
    payload = work.micro_batch_size * length * work.model.d_model * work.stream_item
    for neighbour, (forward, backward) in ((stage.number + 1, ("send", "recv")), (stage.number - 1, ("recv", "send"))):
        if 0 <= neighbour < num_stages(config) and neighbour not in mine:
            found.add("pp", forward, 2, payload, "forward", work.micro_batches)
            found.add("pp", backward, 2, payload, "backward", work.micro_batches)


def _sliced(found: _Sum, work: Workload, stage: Stage) -> None:
    """Gradients that saw a slice of the sequence, all of a stage's in one sum."""
    if work.parallelism.sequence:
        shards, ranks = work.layout.size("dp_shard"), work.layout.size("tp")
        elements = sum(p.shard(shards) for p in stage.parameters() if not p.cut)
        found.add("tp", "all_reduce", ranks, elements * MASTER, "step")


def _ends(found: _Sum, work: Workload, held: list[Stage]) -> None:
    """A tied embedding's gradients, where the first and the last stage are on two ranks."""
    ends = [stage for stage in held if stage.first or stage.last]
    if work.layout.size("pp") > 1 and work.model.tied_embeddings and len(ends) == 1:
        table = ends[0].others[0 if ends[0].first else -1]
        payload = table.shard(work.layout.size("dp_shard")) * MASTER
        found.add("pp", "send", 2, payload, "step")
        found.add("pp", "recv", 2, payload, "step")
