"""Analytical cost model of a training step.

Ops of the model's profile are timed by a roofline model, and collectives as rings over the links that they cross. The
pipeline's bubble is computed in closed form. Communication overlaps with the passes that do not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from math import log2, prod
from operator import add, mul
from typing import Any, NamedTuple

import numpy as np

from gptlite.config.cluster import ClusterConfig
from gptlite.models.registry import spec_of
from gptlite.parallelism.axes import DATA_AXES, EXPERT, EXPERT_DATA_AXES, WORLD
from gptlite.parallelism.config import ActivationCheckpointing, Offload
from gptlite.parallelism.layout import CONTEXT, splits_backward
from gptlite.satellites.plan.compression import steps_of_run, touched_bytes
from gptlite.satellites.plan.hardware import Device, Links, device_of, ranks_on_node, waiting_for_cores
from gptlite.satellites.plan.memory import most
from gptlite.satellites.plan.optimizers import products, update_bytes
from gptlite.satellites.plan.parameters import Alike, PipelinePartition, cut, inventory, num_blocks, runs, stages
from gptlite.satellites.plan.profile import plain_profile
from gptlite.satellites.plan.segments import Op, Segment
from gptlite.satellites.plan.timeline import pipeline_seconds
from gptlite.satellites.plan.traffic import DATA_LINKS, among, message_bytes, moved, outside_layers, reductions
from gptlite.satellites.plan.workload import MASTER, Prediction, RankBytes, Workload

# Axes along which a layer waits for communication: of keys and values, rows of experts, or batch-norm statistics.
EXPOSED = (CONTEXT, EXPERT, *DATA_AXES)
# Seconds of the parts of a model. Dims: part; OPS, communication along the tensor axis, and along the axes in EXPOSED;
# forward and backward pass.
Parts = np.ndarray[Any, np.dtype[np.float64]]
OPS = 0
COPY_OPS = 12  # kernels that one FSDP2 collective launches


def predict(work: Workload, cluster: ClusterConfig, memory: tuple[int, RankBytes] | None = None) -> Prediction:
    """Predict the step of a run on a cluster. Raises ConfigError if the cluster has no peak FLOP/s for the dtype.

    `memory`: the result of `memory.most`; None to compute it here.
    """
    return Costs(cluster).predict(work, memory or most(work))


def stage_seconds(work: Workload, cluster: ClusterConfig) -> tuple[list[float], list[float], float]:
    """Return three arguments of `timeline`: the seconds of a micro-batch's forward and of its backward pass in each
    stage, and the seconds of a message."""
    forward, backward = _stages(Costs(cluster).ranks(work, cut(work)), cut(work))
    return forward, backward, _message(work, cluster)


def peak_flops(cluster: ClusterConfig, dtype: str, world: int) -> float:
    """Return the peak FLOP/s of the devices that `world` ranks use; on CPUs, that of all nodes."""
    devices = cluster.nodes or 1 if cluster.device == "cpu" else world
    return cluster.peak_tflops[dtype] * 1e12 * devices


def cost_per_billion_tokens(prediction: Prediction, cluster: ClusterConfig, world: int) -> float | None:
    """Return the dollars for a billion tokens on `world` ranks, or None if the cluster has no price. On CPUs, the price
    is per node."""
    if cluster.dollars_per_device_hour is None:
        return None
    devices = world if cluster.device == "cuda" else -(-world // ranks_on_node(cluster, world))
    return devices * cluster.dollars_per_device_hour * 1e9 / prediction.tokens_per_second / 3600


def flops_per_token(work: Workload) -> float:
    """Return the FLOPs per token, forward and backward, without recomputation. They come from the model's formula, or
    from its profile if it has no formula."""
    if (found := spec_of(work.model).flops(work.model, work.sequence_length)) is not None:
        return num_blocks(work.model) * found[0] + found[1]
    blocks = dict(runs(work.model, range(num_blocks(work.model))))
    profile = plain_profile(work)
    times = 1, *(blocks[kind] for kind in range(len(profile.blocks))), 1
    each = [sum(op.flops for segment in pair for op in segment.ops) for pair in profile.pairs]
    return sum(map(mul, times, each)) * work.layout.size("tp") / work.rank_tokens


class Passes(NamedTuple):
    """Seconds of a micro-batch's forward and backward pass; recomputation counts as backward."""

    forward: float
    backward: float


class _Inside(NamedTuple):
    """Work of a rank inside its layers, per micro-batch. `tensor` is exposed communication inside layers, which
    `passes` does not include. `shares`: the share of each of the rank's stages in the seconds of its blocks."""

    layers: int
    shares: list[float]
    passes: Passes
    tensor: Passes


class _Outside(NamedTuple):
    """Seconds of a step's collectives outside the layers: `step`, which cannot overlap, and `forward` and `backward`,
    which can overlap with these passes. `copied`: bytes that FSDP2 copies for `count` collectives. `again`: seconds,
    copied bytes and collectives of one more gradient reduction. `stepped`: elements that the rank's optimizer updates.
    """

    step: float
    forward: float
    backward: float
    copied: float
    count: int
    again: tuple[float, float, int]
    stepped: int


class _Rank(NamedTuple):
    """Seconds of one pipeline rank: `passes` of a micro-batch in all its stages, of which `tensor` is exposed
    communication inside layers, `data` for a step's exposed data-parallel communication, and `update` for the
    optimizer. `shares`: see _Inside."""

    shares: list[float]
    passes: Passes
    tensor: float
    data: float
    update: float


class Costs:
    """Predicted seconds of layouts on a cluster, with caches for one model, batch, optimizer and world."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.cluster = cluster
        self._devices: dict[object, Device] = {}
        self._models: dict[object, Parts] = {}
        self._insides: dict[object, _Inside] = {}
        self._outsides: dict[object, _Outside] = {}
        self._messages: dict[object, float] = {}

    def predict(self, work: Workload, memory: tuple[int, RankBytes]) -> Prediction:
        """Predict the step of a layout, or with a 1-bit optimizer the mean of the run's steps. `memory` is the layout's
        fullest rank and that rank's bytes."""
        steps = [(1, work)] if work.exchanging else steps_of_run(work).kinds(work)
        predicted = [(number, self._predict(step, memory)) for number, step in steps]
        (_, first), total = predicted[0], sum(number for number, _ in predicted)
        if len(predicted) == 1:
            return first
        names = [each.name for each in fields(Prediction) if each.name.endswith("_seconds")]
        mean = {name: sum(number * getattr(step, name) for number, step in predicted) / total for name in names}
        faster = first.step_seconds / mean["step_seconds"]
        return replace(first, **mean, tokens_per_second=first.tokens_per_second * faster, mfu=first.mfu * faster)

    def _predict(self, work: Workload, memory: tuple[int, RankBytes]) -> Prediction:
        """Predict one step, dense or as `work.exchanging` says."""
        world, count, pipeline = work.layout.world_size, work.micro_batches, cut(work)
        ranks = self.ranks(work, pipeline)
        slowest = max(ranks.values(), key=lambda cost: cost.passes.forward + cost.passes.backward)
        forward, backward = _stages(ranks, pipeline)
        busy = [sum([forward[stage] + backward[stage] for stage in held]) for held in pipeline.stages]
        hop = work.layout, work.parallelism.sequence, work.micro_batch_size, len(pipeline.layers)
        if hop not in self._messages:
            self._messages[hop] = _message(work, self.cluster)
        whole = pipeline_seconds(work.parallelism, count, forward, backward, busy, self._messages[hop])
        # Ranks that share a core compute in each other's bubbles; a tensor-axis collective waits for all its ranks.
        waiting = waiting_for_cores(self.cluster, world)
        if waiting > 1:
            kinds = [ranks[kind] for kind in pipeline.kinds]
            computing = sum(seconds - cost.tensor for seconds, cost in zip(busy, kinds, strict=True)) / len(kinds)
            whole = max(whole, count * (waiting * computing + slowest.tensor))
        # The bubble is the time of all passes minus the work of the busiest rank.
        own = min(whole, waiting * count * max(busy))
        data = max([cost.data for cost in ranks.values()])
        update = waiting * max([cost.update for cost in ranks.values()])
        tensor = min(own, count * slowest.tensor)
        # The slowest of more nodes is slower; all others wait for it, at the latest when gradients are summed.
        waits = whole * self.cluster.straggle * log2(Links(self.cluster, work.layout).group(WORLD).nodes)
        step = whole + data + waits + update
        tokens = work.tokens / step
        rank, most_bytes = memory
        return Prediction(
            step_seconds=step,
            compute_seconds=own - tensor,
            communication_seconds=tensor + data + waits,
            bubble_seconds=whole - own,
            optimizer_seconds=update,
            tokens_per_second=tokens,
            mfu=tokens * flops_per_token(work) / peak_flops(self.cluster, work.dtype, world),
            memory=most_bytes,
            memory_rank=rank,
        )

    def ranks(self, work: Workload, pipeline: PipelinePartition) -> dict[Alike, _Rank]:
        """Return the cost of one pipeline rank of each kind."""
        fp8, work = work.fp8, replace(work, fp8=False)  # the profile is that of 16 bits; see Device.block_seconds
        config, layout = work.parallelism, work.layout
        links, hardware = Links(self.cluster, layout), (work.dtype, layout.world_size, fp8)
        if hardware not in self._devices:
            self._devices[hardware] = device_of(self.cluster, *hardware)
        device = self._devices[hardware]
        degrees = layout.size("tp"), layout.context, layout.size(EXPERT), layout.size("pp") == 1, config.sequence
        model = *degrees, config.activation_checkpointing, work.micro_batch_size, work.sharded, fp8
        if plain_profile(work).sums_data:
            model = *model, layout
        if model not in self._models:
            self._models[model] = model_seconds(work, device, links)
        split, costs = splits_backward(config), {}
        for kind, rank in pipeline.first.items():
            inside = *model, work.micro_batches, split, *kind
            if inside not in self._insides:
                self._insides[inside] = self._inside(work, device, rank, self._models[model])
            # The schedule matters only with ZeRO 3, which gathers parameters for each pass.
            order = (config.schedule, rank, work.micro_batches) if config.zero == 3 else ()
            outside = layout, config.sequence, kind, order, work.exchanging, work.alone
            if outside not in self._outsides:
                self._outsides[outside] = _outside(work, links, rank)
            costs[kind] = self._rank(work, device, rank, self._insides[inside], self._outsides[outside])
        return costs

    def _inside(self, work: Workload, device: Device, rank: int, model: Parts) -> _Inside:
        (begin, *blocks, end), held = model, stages(work, rank)
        layers, whole, seconds = sum(stage.layers for stage in held), np.zeros_like(begin), list[float]()
        for stage in held:
            mine = np.zeros_like(begin)
            for kind, count in stage.runs:
                mine = mine + count * blocks[kind]
            whole = whole + mine + stage.first * begin + stage.last * end
            seconds.append(sum(mine[OPS].tolist()))
        shares = [each / sum(seconds) for each in seconds] if layers else [1.0]
        (forward, backward), (sent, sent_back), (waits, waits_back) = whole.tolist()
        parameters = sum(stage.sharded(1) for stage in held)
        # Gradient accumulation reads and writes the sum and reads the gradient, except in the first micro-batch.
        summed = (2 * work.reduce_item + work.gather_item) * (work.micro_batches - 1) / work.micro_batches
        passes = Passes(forward, backward + device.move(summed * parameters, 8 * layers))
        # Communication along the tensor axis and the axes in EXPOSED is exposed. An exception is the backward pass of
        # a column-parallel layer: its compute overlaps with the sum of the input's gradient and a second gather of the
        # input. This is all of the backward traffic without sequence parallelism, and two thirds of it with sequence
        # parallelism.
        share = 0.0 if splits_backward(work.parallelism) else 2 / 3 if work.parallelism.sequence else 1.0
        hidden = Passes(0.0, self.cluster.overlap * min(sent_back * share, forward / 2) if share else 0.0)
        if (overlap := self.cluster.tensor_overlap) is not None:  # of another code base
            hidden = Passes(overlap * min(sent, forward), overlap * min(sent_back, backward))
        return _Inside(
            layers, shares, passes, Passes(sent + waits - hidden.forward, sent_back + waits_back - hidden.backward)
        )

    def _rank(self, work: Workload, device: Device, rank: int, inside: _Inside, outside: _Outside) -> _Rank:
        passes, more, zero = inside.passes, reductions(work) - 1, work.parallelism.zero
        seconds, copied, count = (more * each for each in outside.again)
        copies = device.move(outside.copied + copied, COPY_OPS * (outside.count + count))
        data = waiting_for_cores(self.cluster, work.layout.world_size) * copies
        shown = outside.step
        # Collectives overlap with the passes in which they run. Forward: all passes with ZeRO 3, else only the first.
        # Backward: all passes with ZeRO 2 and 3, else only the last.
        for total, compute, often in (
            (outside.forward, passes.forward, zero == 3),
            (outside.backward + seconds, passes.backward, zero >= 2),
        ):
            shown += total - min(self.cluster.overlap * total, compute * (work.micro_batches if often else 1))
        update = device.move(update_bytes(work.optimizer) * outside.stepped, 12 * (inside.layers + 1))
        update += _whole_matrices(work, device, Links(self.cluster, work.layout), rank)
        offload, update = self._offloaded(work, device, rank, passes, update)
        exposed = inside.tensor.forward + inside.tensor.backward
        return _Rank(inside.shares, Passes(*map(add, passes, inside.tensor)), exposed, shown + data + offload, update)

    def _offloaded(
        self, work: Workload, device: Device, rank: int, passes: Passes, update: float
    ) -> tuple[float, float]:
        """Return the exposed seconds of offload's copies, and the seconds of the update. `update`: seconds of the
        update without offload.

        Copies overlap with the step's passes as data-parallel communication does. The ranks of a node share its memory
        and its disk. Disk traffic and the update run concurrently, so only the longer of the two counts.
        """
        if work.parallelism.offload is Offload.none:
            return 0.0, update
        cluster, traffic = self.cluster, moved(work, rank)
        copied, ranks = traffic.to_device + traffic.to_host, ranks_on_node(cluster, work.layout.world_size)
        if cluster.device == "cpu":  # copies from memory to memory do not overlap with compute
            copies = device.move(2 * copied)
        else:
            seconds = copied / (cluster.host_link_gb_per_second * 1e9)
            computing = work.micro_batches * (passes.forward + passes.backward)
            copies = seconds - min(cluster.overlap * seconds, computing)
            update *= device.bandwidth / (cluster.host_memory_gb_per_second * 1e9 / ranks)
        disk = (traffic.read + traffic.written) / (cluster.disk_gb_per_second * 1e9 / ranks)
        return copies, max(update, disk)


def _whole_matrices(work: Workload, device: Device, links: Links, rank: int) -> float:
    """Return the seconds that an update takes for products of whole matrices (Muon), and for sending matrices to the
    ranks that compute them and back. The ranks that hold a matrix's shards or copies divide the matrices among
    themselves (see gptlite.parallelism.matrix_gather). 0 for optimizers without such products."""
    if not products(work.optimizer, 1, 1):
        return 0.0
    held, elements, seconds = inventory(work.model, 1).matrices, 0, 0.0
    for stage in stages(work, rank):
        for kind, count in stage.runs:
            for *shape, number in held[kind]:
                gemms = products(work.optimizer, *shape)
                each = sum(2.0 * m * k * n / device.rate(m, k, n) + device.kernel for m, k, n in gemms)
                seconds, elements = seconds + count * number * each, elements + count * number * prod(shape)
    layout, copies = work.layout, work.layout.size("dp_replicate")
    local, sent = MASTER * elements / layout.size("tp", "dp_shard"), 0.0
    # Shards are sent to a matrix's owner and back. The owner also sends its result to all ranks with a copy.
    for axis, payload in (("tp", 2 * local / copies), ("dp_shard", 2 * local / copies), ("dp_replicate", local)):
        if layout.size(axis) > 1:
            sent += links.once("all_to_all", payload, links.group(axis))
    return seconds / layout.size("tp", "dp_shard", "dp_replicate") + sent


def _outside(work: Workload, links: Links, rank: int) -> _Outside:
    """Return the cost of a pipeline rank's collectives outside the layers."""
    sent = outside_layers(work, rank)
    step = sum(links.seconds(each) for each in sent if each.phase == "step")
    data = [each for each in sent if each.axis in DATA_LINKS]
    copies = DATA_AXES[0], EXPERT_DATA_AXES[0]  # of shards, which are summed once a step
    forward, backward = ([each for each in data if each.phase == phase] for phase in ("forward", "backward"))
    again = [each for each in backward if each.kind != "all_gather" and each.axis not in copies]
    seconds = [sum(map(links.seconds, some)) for some in (forward, backward, again)]
    exchanged = [each for each in data if each.kind == "all_to_all" and each.phase == "step"]
    copied = [sum(touched_bytes(work, each) for each in some) for some in (forward + backward + exchanged, again)]
    counts = [sum(each.count for each in some) for some in (data, again)]
    stepped = sum(stage.sharded(work.layout.size("dp_shard")) for stage in stages(work, rank))
    return _Outside(step, seconds[0], seconds[1], copied[0], counts[0], (seconds[2], copied[1], counts[1]), stepped)


def model_seconds(work: Workload, device: Device, links: Links) -> Parts:
    """Return the seconds of a micro-batch in each part of the model: its beginning, one block of each kind, its end.

    In a recomputed block, full recomputation repeats all ops, and selective recomputation the ops whose results were
    not kept; both repeat the forward pass's communication.
    """

    def seconds(ops: Iterable[Op], block: bool) -> float:
        return sum(map(device.block_seconds if block else device.seconds, ops))

    def sent(segment: Segment, *axes: str) -> float:
        found = (each for each in segment.sent if each.axis in axes)
        return sum(links.seconds(each) for some in found for each in among(links.layout, some))

    profile, mode = plain_profile(work), work.parallelism.activation_checkpointing
    last = len(profile.pairs) - 1
    parts = np.array(
        [
            [
                [seconds(each.ops, 0 < place < last) for each in pair],
                *([sent(each, *axes) for each in pair] for axes in (("tp",), EXPOSED)),
            ]
            for place, pair in enumerate(profile.pairs)
        ]
    )
    for block, forward in zip(parts[1:-1], profile.blocks if mode.recomputes else (), strict=False):
        selective = mode is ActivationCheckpointing.selective
        again = seconds((op for op in forward.ops if not (selective and op.kept)), block=True)
        block[:, 1] += [again, *block[OPS + 1 :, 0]]
    return parts


def _stages(ranks: dict[Alike, _Rank], pipeline: PipelinePartition) -> tuple[list[float], list[float]]:
    """Return the seconds of a micro-batch's forward and of its backward pass in each stage: the rank's seconds, divided
    among its stages by `shares`."""
    forward, backward = [0.0] * len(pipeline.layers), [0.0] * len(pipeline.layers)
    for kind, held in zip(pipeline.kinds, pipeline.stages, strict=True):
        cost = ranks[kind]
        for stage, share in zip(held, cost.shares, strict=True):
            forward[stage], backward[stage] = cost.passes.forward * share, cost.passes.backward * share
    return forward, backward


def _message(work: Workload, cluster: ClusterConfig) -> float:
    """Return the seconds of sending the largest activation between stages to the next pipeline rank."""
    links = Links(cluster, work.layout)
    payload = max(message_bytes(work, stage) for stage in range(len(cut(work).layers)))
    return links.once("send", payload, links.group("pp")) if payload else 0.0
