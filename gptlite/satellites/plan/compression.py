"""Compressed communication of data ranks in a step: messages, memory, and the bytes that codecs read and write.

For `parallelism.compression`, `parallelism.zeropp` and the 1-bit optimizers. Lengths of messages come from the
functions of these satellites. An exchange of messages between all ranks is an all-to-all here: a compressed
reduce-scatter is one, a compressed all-reduce two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from gptlite.parallelism.axes import DATA_AXES
from gptlite.parallelism.config import Compression
from gptlite.parallelism.layout import splits_backward
from gptlite.satellites.compressed.blocks import BlockLayout
from gptlite.satellites.compressed.codecs import CODECS, Codec
from gptlite.satellites.compressed.powersgd import Uncoded, factor_values, pays
from gptlite.satellites.compressed.sums import reduce_scatter_bytes
from gptlite.satellites.onebit.adam import refreshes
from gptlite.satellites.onebit.configs import OneBitAdamConfig, OneBitLambConfig, ZeroOneAdamConfig
from gptlite.satellites.onebit.momenta import CODEC as SIGN
from gptlite.satellites.onebit.momenta import vector_layout
from gptlite.satellites.onebit.zero_one import schedule
from gptlite.satellites.plan.parameters import GatherGroup, StageParameters, copies, stages
from gptlite.satellites.plan.workload import ACROSS, INSIDE, MASTER, Transfer, Workload
from gptlite.satellites.zeropp.wire import Sent, Shards, machine_ranks

FACTORS = Uncoded("powersgd")
SQUARE = 8  # bytes of a gradient's squared norm, float64
COPIES = 2  # FSDP2 reads and writes each gathered or reduced tensor once more, to copy it into or out of its buffer
# Reads and writes of fp32 by our codecs, beside which those of messages are few. Of each value in an exchange: 3 to
# align it and 3 to add its error; of a value that is sent 1 to encode it, 1 to decode it and 3 for the new error; of a
# value that is received 1 to decode it and 3 to add it. Of a gathered value: decoded, without padding, in the compute
# dtype.
ALIGNED, SENT, DECODED = 6, 9, 6
LOW_RANK = 19  # likewise of each value that PowerSGD sums: aligned, corrected, multiplied twice, and three products
LARGEST = 2  # matrices as large as the largest one, beside the aligned values, in PowerSGD


def gradient_codec(work: Workload) -> Codec | None:
    """Return the codec of `parallelism.compression`; None if gradients are summed densely."""
    name = work.parallelism.compression
    if name is Compression.none or work.layout.fsdp_size == 1:
        return None
    return FACTORS if name is Compression.powersgd else CODECS[name.value]


def is_compressed(work: Workload) -> bool:
    """Return True if data ranks send anything compressed, or keep copies in nodes."""
    zeropp = work.parallelism.zeropp
    names = {zeropp.weights, zeropp.gradients, work.parallelism.compression}
    several = work.layout.fsdp_size > 1
    return (several and (zeropp.secondary or names != {Compression.none})) or steps_of_run(work)[1] > 0


def sums(
    work: Workload, group: GatherGroup, longest: GatherGroup, axes: tuple[str, ...], times: tuple[int, int]
) -> Iterator[Transfer]:
    """Yield the transfers that sum a group's gradients over data ranks.

    `longest`: the group on the tensor rank with the longest shards. `axes`: those of copies and of shards. `times`: the
    numbers of sums over each in a step.
    """
    (copy, cut), (summed, reduced) = axes, times
    replicas, ranks = work.layout.size(copy), work.layout.size(cut)
    if (codec := gradient_codec(work)) and replicas == 1:
        sent = reduce_scatter_bytes(codec, error_layout(work, longest.sizes, codec).blocks, ranks)
        yield from _exchange(cut, ranks, sent, group.number * reduced)
        return
    if codec := _zeropp_codec(work):
        sent = _shards(work, group).two_hops(codec)
        yield from _hops(work, "all_to_all", sent, group.number * reduced, "backward")
    elif not (work.exchanging and replicas == 1):
        size = ranks * group.elements * work.reduce_item
        yield Transfer(cut, "reduce_scatter", ranks, size, group.number * reduced, "backward")
    codec = gradient_codec(work)
    if codec is FACTORS:
        for number in factor_values(shapes(group), work.parallelism.compression_rank):
            sent = reduce_scatter_bytes(FACTORS, -(-number // replicas), replicas)
            yield from _exchange(copy, replicas, sent, 2 * group.number * summed)
    elif codec:
        sent = reduce_scatter_bytes(codec, error_layout(work, longest.sizes, codec).blocks // replicas, replicas)
        yield from _exchange(copy, replicas, sent, 2 * group.number * summed)
    elif not work.exchanging:
        yield Transfer(
            copy, "all_reduce", replicas, group.elements * work.reduce_item, group.number * summed, "backward"
        )


def gathers(work: Workload, group: GatherGroup, cut: str, times: int, phase: str) -> Iterator[Transfer]:
    """Yield the transfers of `times` gathers of a group's parameters over the axis `cut`."""
    zeropp, ranks, count = work.parallelism.zeropp, work.layout.size(cut), group.number * times
    codec = CODECS.get(zeropp.weights.value)
    if ranks == 1 or (codec is None and not zeropp.secondary):
        yield Transfer(cut, "all_gather", ranks, ranks * group.elements * work.gather_item, count, phase)
    elif zeropp.secondary and group.block and phase == "backward":
        yield from _hops(work, "all_gather", _shards(work, group).gather_inside(work.gather_item), count, phase)
    else:
        sent = _shards(work, group).gather(codec, work.gather_item)
        if work.device == "cpu":
            yield from _hops(work, "all_gather", sent, count, phase)
        else:  # NCCL chooses the ways itself
            whole = (sent.inside + sent.across) * ranks // (ranks - 1)
            yield Transfer(cut, "all_gather", ranks, whole, count, phase)


def momenta(work: Workload, held: Sequence[StageParameters]) -> Iterator[Transfer]:
    """Yield the transfers of a 1-bit optimizer in a step that exchanges momenta."""
    axis, ranks, _ = _lanes(work)
    for sizes in () if work.alone else vectors(work, held):
        sent = reduce_scatter_bytes(SIGN, vector_layout(sizes, ranks).blocks // ranks, ranks)
        yield from _exchange(axis, ranks, sent, 2, "step")
    if axis == DATA_AXES[0]:  # with ZeRO 1 the sum over ranks follows from each rank's own whole gradients
        yield Transfer(axis, "all_reduce", ranks, SQUARE * sum(map(len, vectors(work, held))), 1, "step")
    if not keeps_whole(work):
        return
    # The sums over other axes that shards of summed gradients take are taken of a rank's own whole gradients too.
    if work.parallelism.sequence:
        uncut = sum(each.elements for stage in held for each in stage.parameters() if not each.cut and each.shape)
        yield Transfer("tp", "all_reduce", work.layout.size("tp"), uncut * MASTER, 1, "step")
    for copy in copies(list(held)) if work.layout.size("pp") > 1 else ():
        for kind in ("send", "recv"):
            yield Transfer("pp", kind, 2, copy.elements * MASTER, 1, "step")


def prepared(work: Workload, held: Sequence[StageParameters]) -> list[Transfer]:
    """Return the transfers of a 1-bit optimizer when momenta are first exchanged after second moments have changed:
    with ZeRO 1 both moments are gathered. `transfers` does not count them."""
    axis, ranks, _ = _lanes(work)
    if ranks == 1 or axis == DATA_AXES[0]:
        return []
    every = [each for stage in held for each in stage.parameters() if each.shape]
    return [Transfer(axis, "all_gather", ranks, MASTER * each.gathered(ranks), 2, "step") for each in every]


class RunSteps(NamedTuple):
    """Numbers of a run's steps: those that sum gradients densely, those that exchange momenta, those between two
    exchanges of 0/1 Adam, and those before which moments are gathered (`prepared`)."""

    dense: int
    exchanging: int = 0
    alone: int = 0
    gathering: int = 0

    def kinds(self, work: Workload) -> list[tuple[int, Workload]]:
        """Return the number of steps of each kind that occurs, and such a step."""
        ways = (self.dense, False, False), (self.exchanging, True, False), (self.alone, True, True)
        return [(number, replace(work, exchanging=sent, alone=alone)) for number, sent, alone in ways if number]


def steps_of_run(work: Workload) -> RunSteps:
    """Return the steps of a run. Without a 1-bit optimizer on several data ranks all are dense."""
    optimizer = work.optimizer
    if not isinstance(optimizer, OneBitAdamConfig | OneBitLambConfig) or work.layout.fsdp_size == 1:
        return RunSteps(work.steps)
    dense, intervals = refreshes(optimizer.freeze_step or 1), None
    if isinstance(optimizer, ZeroOneAdamConfig):
        dense, intervals = schedule(optimizer)
    later = {*range(1, work.steps + 1)}.difference(dense)
    exchanging = sum(intervals is None or intervals.ends(step) for step in later)
    gathering = sum(step + 1 not in {*dense} for step in dense)
    return RunSteps(len(dense), exchanging, len(later) - exchanging, gathering)


def shapes(group: GatherGroup) -> list[tuple[int, int]]:
    """Return the rows and columns of each parameter's shard, as PowerSGD has them."""
    return [(size // max(1, row), max(1, row)) for size, row in zip(group.sizes, group.rows, strict=True)]


def vectors(work: Workload, held: Sequence[StageParameters]) -> list[tuple[int, ...]]:
    """Return the sizes of the parameters of each vector that a 1-bit optimizer exchanges: those that are cut over the
    tensor axis, all others, and each tied parameter of which another pipeline rank has a copy."""
    *_, shards = _lanes(work)
    apart = copies(list(held)) if work.layout.size("pp") > 1 else []
    every = [each for stage in held for each in stage.parameters() if each.shape]
    together = [[each for each in every if each.cut == cut and each not in apart] for cut in (True, False)]
    groups = [each for each in [*together, *([each] for each in apart)] if each]
    return [tuple(each.shard(shards) for each in group) for group in groups]


def error_layout(work: Workload, sizes: tuple[int, ...], codec: Codec) -> BlockLayout:
    """Return the alignment of the errors of a bucket whose shards have `sizes` elements of each parameter."""
    replicas, shards = (work.layout.size(axis) for axis in DATA_AXES)
    rows = 1 if replicas > 1 else shards
    return BlockLayout(sizes, codec.width, rows, replicas)


def kept_bytes(work: Workload, held: Sequence[StageParameters], longest: Sequence[StageParameters]) -> int:
    """Return the bytes that a rank keeps between steps: errors, masks and roots of a 1-bit optimizer, whole momenta
    with ZeRO 1, and the copies of ZeRO++'s nodes. `longest`: the stages on the tensor rank with the longest shards, as
    which errors of gradients are aligned."""
    shards, size = work.layout.size("dp_shard"), 0
    for stage, longer in zip(held, longest, strict=True):
        pairs = (each.groups(work.parallelism.bucket_layers, shards) for each in (stage, longer))
        for group, most in zip(*pairs, strict=True):
            if codec := gradient_codec(work):
                size += group.number * _aligned(error_layout(work, most.sizes, codec))
                rank = work.parallelism.compression_rank
                low = [columns for rows, columns in shapes(group) if codec is FACTORS and pays(rows, columns, rank)]
                size += group.number * MASTER * rank * sum(low)
            if work.parallelism.zeropp.secondary and group.block and not splits_backward(work.parallelism):
                node = _node_size(work)
                size += group.number * shards * group.elements * work.gather_item // node
    if work.exchanging:
        _, ranks, shards = _lanes(work)
        whole = 1 + keeps_whole(work)
        for sizes in vectors(work, held):
            layout = vector_layout(sizes, ranks)
            size += _aligned(layout) + layout.blocks * layout.width + whole * MASTER * sum(sizes)
            if steps_of_run(work).alone:  # parameters at the last exchange, and the steps since
                size += 2 * MASTER * sum(sizes)
    return size


def sum_buffers(work: Workload, sizes: tuple[int, ...]) -> int:
    """Return the bytes of the buffers in which a bucket's gradients are aligned, encoded and decoded; 0 if they are
    summed densely."""
    replicas, shards = (work.layout.size(axis) for axis in DATA_AXES)
    if (codec := gradient_codec(work)) is FACTORS:
        return _aligned(error_layout(work, sizes, FACTORS)) + LARGEST * MASTER * max(sizes)
    if codec:
        return _buffers(error_layout(work, sizes, codec), codec, replicas if replicas > 1 else shards)
    if codec := _zeropp_codec(work):
        node, layout = _node_size(work), BlockLayout(sizes, codec.width, shards)
        first = _buffers(layout, codec, node) if node > 1 else 0
        turned = _aligned(layout) if 1 < node < shards else 0  # rows in the order of places
        return turned + max(first, _buffers(BlockLayout(sizes, codec.width, shards // node), codec, shards // node))
    return 0


def pending_bytes(work: Workload, held: Sequence[StageParameters]) -> int:
    """Return the bytes of the sums over shards that wait for the last micro-batch, to be summed over replicas. FSDP2
    has such sums in the place of gradients."""
    replicas, shards = (work.layout.size(axis) for axis in DATA_AXES)
    if not is_compressed(work) or replicas == 1 or work.parallelism.zero < 2 or work.micro_batches == 1:
        return 0
    return work.reduce_item * sum(stage.sharded(shards) - stage.scalars for stage in held)


def update_buffers(work: Workload, held: Sequence[StageParameters]) -> int:
    """Return the most bytes that a 1-bit optimizer's update takes besides its state: first a rank's own whole
    gradients, if it keeps them, and the buffers of the exchange, then divisors and updates. LAMB keeps the former
    momenta."""
    _, ranks, _ = _lanes(work)
    layouts = [vector_layout(each, ranks) for each in vectors(work, held)]
    masked = 2 * (work.device == "cpu")  # a CPU copies the mask to fp32 to multiply by it
    exchange = max((max(masked * _aligned(each), _buffers(each, SIGN, ranks)) for each in layouts), default=0)
    if keeps_whole(work):
        exchange += MASTER * sum(sum(sizes) for sizes in vectors(work, held))
    own = MASTER * sum(stage.sharded(work.layout.size("dp_shard")) for stage in held)
    if isinstance(work.optimizer, OneBitLambConfig):
        return own + max(exchange, own)
    return max(exchange, 2 * own)


def keeps_whole(work: Workload) -> bool:
    """Return True if a 1-bit optimizer keeps whole gradients and momenta on each rank: with ZeRO 1 without replicas."""
    return work.exchanging and work.layout.size("dp_shard") > 1 and work.layout.size("dp_replicate") == 1


def touched_bytes(work: Workload, sent: Transfer) -> float:
    """Return the bytes that FSDP2's copies, and codecs, read and write for a transfer outside the layers."""
    codec = CODECS.get(work.parallelism.zeropp.weights.value)
    if sent.kind == "all_to_all":
        codec = SIGN if work.exchanging else _zeropp_codec(work) or gradient_codec(work)
        assert codec is not None
        if codec is FACTORS:
            return sent.count * LOW_RANK * sent.payload * _compressed(work)
        moved = ALIGNED + SENT * (sent.ranks - 1) / sent.ranks
        return sent.count * MASTER * moved * _values(codec, sent.payload)
    if sent.kind == "all_gather":
        copied = work.parallelism.zeropp.secondary and sent.phase == "backward"
        if codec is not None and not copied and sent.axis != ACROSS:
            return sent.count * MASTER * DECODED * _values(codec, sent.payload)
        if work.flat:
            return 0.0
    return sent.count * COPIES * sent.payload


def _compressed(work: Workload) -> float:
    """Return the number of values that PowerSGD sums for each that a rank adds to an exchange."""
    groups = [
        (group.number, group)
        for stage in stages(work, 0)
        for group in stage.groups(work.parallelism.bucket_layers, work.layout.size("dp_shard"))
    ]
    values = sum(n * sum(factor_values(shapes(each), work.parallelism.compression_rank)) for n, each in groups)
    return sum(n * each.elements for n, each in groups) / (2 * values)  # two exchanges for a sum


def _values(codec: Codec, payload: float) -> float:
    return payload * codec.width / codec.message_bytes(1)


def _aligned(layout: BlockLayout) -> int:
    return MASTER * layout.rows * layout.blocks * layout.width


def _buffers(layout: BlockLayout, codec: Codec, ranks: int) -> int:
    """Return the bytes of a sum's buffers: aligned values, messages sent and received, and a decoded one."""
    whole = _aligned(layout)
    message = codec.message_bytes(layout.rows * layout.blocks // ranks)
    return whole + 2 * (ranks - 1) * message + whole // ranks


def _lanes(work: Workload) -> tuple[str, int, int]:
    """Return the axis along which momenta are exchanged, its degree, and the number of shards of what is exchanged."""
    copy, cut = DATA_AXES
    if work.layout.size(copy) > 1:
        return copy, work.layout.size(copy), work.layout.size(cut)
    return cut, work.layout.size(cut), 1


def _zeropp_codec(work: Workload) -> Codec | None:
    return CODECS.get(work.parallelism.zeropp.gradients.value) if work.layout.size("dp_shard") > 1 else None


def _node_size(work: Workload) -> int:
    node = work.node_ranks or work.layout.world_size
    return work.parallelism.zeropp.node_size or machine_ranks(work.layout, node)


def _shards(work: Workload, group: GatherGroup) -> Shards:
    node = _node_size(work)
    return Shards(group.sizes, work.layout.size("dp_shard") // node, node)


def _hops(work: Workload, kind: str, sent: Sent, count: int, phase: str) -> Iterator[Transfer]:
    """Yield transfers inside nodes and between them in which this rank sends so many bytes."""
    node = _node_size(work)
    nodes = work.layout.size("dp_shard") // node
    for axis, ranks, size in ((INSIDE, node, sent.inside), (ACROSS, nodes, sent.across)):
        if ranks > 1 and size:
            alone = node == 1 or nodes == 1
            yield Transfer("dp_shard" if alone else axis, kind, ranks, size * ranks // (ranks - 1), count, phase)


def _exchange(axis: str, ranks: int, sent: int, count: int, phase: str = "backward") -> Iterable[Transfer]:
    """Return an exchange between all ranks in which this one sends so many bytes."""
    return [Transfer(axis, "all_to_all", ranks, sent * ranks // (ranks - 1), count, phase)] if ranks > 1 else []
