"""Communication of one rank in a training step: all collectives, pipeline messages and copies of offload.

Collectives inside layers are read from the model's profile. All others are computed from sizes; they occur in
gptlite.parallelism.zero (FSDP2's gathers and reductions, which satellites may compress, see compression.py; copies to
and from the host), gptlite.parallelism.pipeline
(messages), gptlite.trainer.step (sums over a step) and gptlite.satellites.nvme.streamed (files).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod

from gptlite.models.registry import spec_of
from gptlite.parallelism.axes import DATA_AXES, EXPERT_DATA_AXES
from gptlite.parallelism.config import Offload
from gptlite.parallelism.layout import Layout, num_stages, splits_backward, stages_of_rank
from gptlite.satellites.plan.compression import gathers as group_gathers
from gptlite.satellites.plan.compression import momenta, prepared, steps_of_run, sums
from gptlite.satellites.plan.parameters import Parameter, StageParameters, all_loads, copies, cut, shared, stages
from gptlite.satellites.plan.profile import halves_of, profile_of
from gptlite.satellites.plan.walk import gathers
from gptlite.satellites.plan.workload import (
    ACROSS,
    INSIDE,
    MASTER,
    Transfer,
    Workload,
    block_input,
    frees_messages,
)

PAGE = 4096  # bytes; each parameter in an optimizer state file begins at a multiple of it
BESIDE = 3  # buffers of a bucket besides those of parameters read ahead: see gptlite.satellites.nvme.parameters
DATA_LINKS = (*DATA_AXES, *EXPERT_DATA_AXES, INSIDE, ACROSS)
SUM = 8  # bytes of a value in the all-reduces of metrics and expert loads, float64
SETTLED = SUM * 7  # bytes of the loss, the squared gradient norm and five stop flags; a model's metrics are added
VALID = 8  # bytes of the number of valid tokens, int64


def transfers(work: Workload, pp_rank: int, tp_rank: int = 0) -> list[Transfer]:
    """Return every collective and message of one step that a pipeline rank takes part in, with equal transfers merged.

    `tp_rank` matters if the tensor axis does not divide the vocabulary. The result is for the first data rank, whose
    shards are the longest. Compiled blocks gather less under sequence and context parallelism than is counted here.
    """
    held = stages(work, pp_rank, tp_rank)
    inside = [_passes(work, stage, tp_rank) for stage in held]
    messages = [_pipeline(work, stage, pp_rank) for stage in held]
    return _together(chain(_outside(work, held, pp_rank, reductions(work)), *inside, *messages))


def outside_layers(work: Workload, pp_rank: int) -> list[Transfer]:
    """Return the transfers along the data axes, counting one reduction of each gradient, and the transfers that occur
    once per step."""
    return _together(_outside(work, stages(work, pp_rank), pp_rank, 1))


def run_bytes(work: Workload, pp_rank: int, tp_rank: int = 0) -> float:
    """Return the mean bytes that a rank sends along the data axes in a step of a run of `work.steps` steps, of which
    with a 1-bit optimizer some sum gradients densely and others exchange momenta."""
    steps = steps_of_run(work)
    total = sum(number * data_bytes(transfers(each, pp_rank, tp_rank)) for number, each in steps.kinds(work))
    total += steps.gathering * data_bytes(prepared(work, stages(work, pp_rank, tp_rank)))
    return total / sum(number for number, _ in steps.kinds(work))


def data_bytes(sent: Iterable[Transfer]) -> float:
    """Return the bytes that a rank sends along the data axes."""
    return sum(each.wire_bytes for each in sent if each.axis in DATA_LINKS)


def _together(every: Iterable[Transfer]) -> list[Transfer]:
    """Merge equal transfers, and drop transfers without payload or with a single rank."""
    counts: dict[tuple[str, str, int, float, str], int] = {}
    for axis, kind, ranks, payload, count, phase in every:
        if ranks > 1 and count and payload:
            key = axis, kind, ranks, payload, phase
            counts[key] = counts.get(key, 0) + count
    return [Transfer(*key[:4], count, key[4]) for key, count in sorted(counts.items())]


def reductions(work: Workload) -> int:
    """Return the number of times that a step reduces each gradient."""
    return work.micro_batches if work.parallelism.zero >= 2 else 1


def sums_copies_often(work: Workload) -> bool:
    """Return True if copies of shards (HSDP) are all-reduced whenever gradients are reduced, instead of once per step:
    see `torch_private.fsdp.reduce_gradients_now`."""
    return splits_backward(work.parallelism) and frees_messages()


def _outside(work: Workload, held: list[StageParameters], pp_rank: int, times: int) -> Iterator[Transfer]:
    """Yield the transfers outside the layers, with gradients reduced `times` times."""
    for stage in held:
        yield from _data(work, stage, pp_rank, times)
        # Replicated parameters have gradients of one slice of the sequence; one all-reduce sums all of a stage's.
        if work.parallelism.sequence:
            elements = sum(p.shard(work.layout.size("dp_shard")) for p in stage.parameters() if not p.cut)
            yield Transfer("tp", "all_reduce", work.layout.size("tp"), elements * MASTER, 1, "step")
    if work.exchanging:
        yield from momenta(work, held)
    for copy in copies(held) if work.layout.size("pp") > 1 else ():
        for kind in ("send", "recv"):
            yield Transfer("pp", kind, 2, copy.shard(work.layout.size("dp_shard")) * MASTER, 1, "step")
    for axis, size in product(DATA_AXES, (VALID, MASTER * sum(stage.scalars for stage in held))):
        yield Transfer(axis, "all_reduce", work.layout.size(axis), size, 1, "step")
    balancing = (*DATA_AXES, "tp") if work.parallelism.sequence else DATA_AXES
    for stage, axis in product(held, balancing):
        yield Transfer(axis, "all_reduce", work.layout.size(axis), SUM * stage.loads, 1, "step")
    yield Transfer("pp", "all_reduce", work.layout.size("pp"), SUM * all_loads(work), 1, "step")
    settled = SETTLED + SUM * len(spec_of(work.model).metrics)
    yield Transfer("world", "all_reduce", work.layout.world_size, settled, 1, "step")


def _passes(work: Workload, stage: StageParameters, tp_rank: int) -> Iterator[Transfer]:
    """Yield the transfers inside the layers of a stage, over all micro-batches of a step."""
    if work.layout.size("tp", "dp_replicate", "dp_shard") == 1:  # the folded axes span these ranks
        return
    # Summed over ranks, as many rows of experts are received as sent, so the mean rank's load is balanced.
    profile, counts = profile_of(work.balanced(1.0), tp_rank), Counter[Transfer]()
    split = splits_backward(work.parallelism) and not stage.first
    if split:
        counts = halves_of(work.balanced(1.0), stage.blocks).sent(stage.units, stage.last)
    numbers = stage.first, *(dict(stage.runs).get(kind, 0) for kind in range(len(profile.blocks))), stage.last
    for (forward, backward), times in zip(profile.pairs, numbers, strict=True):
        for sent in (*forward.sent, *(() if split else backward.sent)):
            counts[sent] += times
    for sent, count in counts.items():
        for each in among(work.layout, sent):
            yield each._replace(payload=round(sent.payload), count=count * work.micro_batches)


def among(layout: Layout, sent: Transfer) -> list[Transfer]:
    """Return the collectives of a layout for `sent`, one of a profile; over data ranks, there is one per data axis."""
    if sent.axis not in DATA_AXES:
        return [sent]
    return [sent._replace(axis=axis, ranks=layout.size(axis)) for axis in DATA_AXES if layout.size(axis) > 1]


def _data(work: Workload, stage: StageParameters, pp_rank: int, reduced: int) -> Iterator[Transfer]:
    """Yield FSDP2's transfers along the data axes for each group of parameters. `reduced`: number of times that each
    gradient is reduced."""
    if work.layout.fsdp_size == 1:
        return
    shards, size = work.layout.size("dp_shard"), work.parallelism.bucket_layers
    longest = next(each for each in stages(work, pp_rank) if each.number == stage.number).groups(size, shards)
    groups, count = stage.groups(size, shards), work.micro_batches
    summed = reduced if sums_copies_often(work) else 1
    for group, most in zip(groups, longest, strict=True):
        axes = EXPERT_DATA_AXES if group.among > 1 else DATA_AXES
        for phase, times in gathered(work, pp_rank, stage.number, group.block).items():
            yield from group_gathers(work, group, axes[1], times, phase)
        yield from sums(work, group, most, axes, (summed, reduced))
    in_turn = work.layout.size("pp") == 1 or (stage.last and work.parallelism.schedule == "1f1b")
    if in_turn and count > 1 and not stage.others and sum(each.number for each in groups) > 1:
        # In the first bucket's backward pass, FSDP2 prefetches the bucket whose forward pass ran before that bucket's:
        # the last one, in the previous micro-batch, if each backward pass directly follows its forward pass. The next
        # forward pass does not gather it again, hence the negative count.
        again, last = count - 1 if work.parallelism.zero == 3 else 1, groups[-1]._replace(number=1)
        yield from group_gathers(work, last, "dp_shard", again, "backward")
        yield from group_gathers(work, last, "dp_shard", 1 - again, "forward")


def gathered(work: Workload, pp_rank: int, stage: int, block: bool) -> dict[str, int]:
    """Return the number of times that a group of a stage's parameters is gathered in a step, by phase.

    Below ZeRO 3, a group is gathered once per step. With ZeRO 3, a block is gathered for each pass and freed after it.
    The other parameters stay gathered from a forward pass to the end of the next backward pass, which may be that of an
    earlier micro-batch.
    """
    if work.parallelism.zero < 3:
        return {"forward": 1}
    counts, mine = gathers(work.parallelism, pp_rank, work.micro_batches), stages_of_rank(work.parallelism, pp_rank)
    return {phase: counts[mine.index(stage), block, phase] for phase in ("forward", "backward")}


def _pipeline(work: Workload, stage: StageParameters, pp_rank: int) -> Iterator[Transfer]:
    """Yield a stage's messages: the activation of each micro-batch to the next stage, and its gradient back."""
    config, mine = work.parallelism, stages_of_rank(work.parallelism, pp_rank)
    for neighbour, (forward, backward) in ((stage.number + 1, ("send", "recv")), (stage.number - 1, ("recv", "send"))):
        if 0 <= neighbour < num_stages(config) and neighbour not in mine:
            payload, count = message_bytes(work, max(stage.number, neighbour)), work.micro_batches
            yield Transfer("pp", forward, 2, payload, count, "forward")
            yield Transfer("pp", backward, 2, payload, count, "backward")


def message_bytes(work: Workload, stage: int) -> int:
    """Return the bytes per micro-batch that a pipeline stage receives from the stage before it; 0 for the first stage,
    and if `stage` is the number of stages."""
    layers = cut(work).layers
    if not 0 < stage < len(layers):
        return 0
    return prod(block_input(work, layers[stage].start)) * work.stream_item


@dataclass(frozen=True)
class OffloadBytes:
    """Bytes that offload moves on one rank in a step: shards copied to the device, gradients copied to the host, and
    state read from and written to disk."""

    to_device: int = 0
    to_host: int = 0
    read: int = 0
    written: int = 0


def moved(work: Workload, pp_rank: int, tp_rank: int = 0) -> OffloadBytes:
    """Return the bytes that offload moves in a step, for the first data rank, whose shards are the longest.

    Each gather copies the shards to the device in the dtype in which they are stored. Each reduction over all data
    ranks copies the gradients to the host in fp32.
    """
    if work.parallelism.offload is Offload.none:
        return OffloadBytes()
    shards, copies = work.layout.size("dp_shard"), work.layout.size("dp_replicate")
    to_device = to_host = 0
    for stage in stages(work, pp_rank, tp_rank):
        for group in stage.groups(work.parallelism.bucket_layers, shards):
            elements = group.elements * group.number
            to_device += work.stored * elements * sum(gathered(work, pp_rank, stage.number, group.block).values())
            to_host += MASTER * elements * (reductions(work) if copies == 1 else 1)
    held = stages(work, pp_rank, tp_rank)
    every = [parameter for stage in held for parameter in stage.parameters()]
    state = work.optimizer.state_elements() * _paged(work, every)
    if work.parallelism.offload is not Offload.nvme:
        return OffloadBytes(to_device, to_host)
    if not work.in_files:
        return OffloadBytes(to_device, to_host, state, state)
    row = _paged(work, [parameter for parameter in every if parameter.shape])
    read = sum(_reads(work, stage, pp_rank) for stage in held) + row * (reductions(work) - 1) + 2 * row + state
    return OffloadBytes(to_device, to_host, read, row * reductions(work) + row + state)


def _reads(work: Workload, stage: StageParameters, pp_rank: int) -> int:
    """Return the bytes of a stage's parameters that a step reads for its passes. Without a pipeline, a backward pass
    begins with the bucket that the forward pass has ended with, whose buffer is still there, unless distributed experts
    are gathered after it."""
    buckets = [
        (_group_pages(work, stage, kinds), times) for kinds, times in stage.buckets(work.parallelism.bucket_layers)
    ]
    blocks = sum(sum(sizes) * times for sizes, times in buckets)
    others = _paged(work, [parameter for parameter in stage.others if parameter.shape])
    counts = [sum(gathered(work, pp_rank, stage.number, block).values()) for block in (True, False)]
    stays = buckets and len(buckets[-1][0]) == 1 and work.layout.size("pp") == 1
    return blocks * counts[0] + others * counts[1] - (work.micro_batches * buckets[-1][0][0] if stays else 0)


def _group_pages(work: Workload, stage: StageParameters, kinds: Sequence[int]) -> list[int]:
    """Return the bytes in a file of the shards of a bucket of blocks, and of each block's distributed experts."""
    dense = _paged(work, [parameter for kind in kinds for parameter in shared(stage.kinds[kind], False)])
    return [dense, *filter(None, (_paged(work, shared(stage.kinds[kind], True)) for kind in kinds))]


def _paged(work: Workload, parameters: Iterable[Parameter]) -> int:
    """Return the bytes of a rank's shards of the parameters in a file, in fp32 and whole pages."""
    shards = work.layout.size("dp_shard")
    return sum(-(-MASTER * parameter.shard(shards) // PAGE) * PAGE for parameter in parameters)


def file_bytes(work: Workload, pp_rank: int, tp_rank: int = 0) -> int:
    """Return the bytes of a rank's files of model state; 0 without offload to disk."""
    if work.parallelism.offload is not Offload.nvme:
        return 0
    every = [parameter for stage in stages(work, pp_rank, tp_rank) for parameter in stage.parameters()]
    rows = 2 * work.in_files * _paged(work, [parameter for parameter in every if parameter.shape])
    return work.optimizer.state_elements() * _paged(work, every) + rows


def buffers_bytes(work: Workload, held: Sequence[StageParameters]) -> int:
    """Return the bytes of the buffers through which a rank's model state is read from and written to disk.

    The size of the two for the update is limited by `offload_buffer_mib` and by the size of the state. If parameters
    are in files, others take the shards of a bucket each (gptlite.satellites.nvme.parameters).
    """
    rows = work.optimizer.state_elements() + 2 * work.in_files
    pages = _paged(work, [parameter for stage in held for parameter in stage.parameters()]) // PAGE
    most = work.parallelism.offload_buffer_mib * 2**20 // max(1, rows * PAGE)
    update = 2 * rows * PAGE * max(1, min(most, -(-pages // 2)))
    if not work.in_files:
        return update
    buckets = ((stage, kinds) for stage in held for kinds, _ in stage.buckets(work.parallelism.bucket_layers))
    largest = max((size for stage, kinds in buckets for size in _group_pages(work, stage, kinds)), default=0)
    return update + (max(1, work.parallelism.prefetch) + BESIDE) * largest
