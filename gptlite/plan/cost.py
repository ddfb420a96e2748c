"""How long a step of a run takes, before it runs: the model's ops by shapes and bytes, collectives by ring over the
links they cross, the pipeline's bubble in closed form, and what of it hides behind what.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gptlite.models.spec import spec_of
from gptlite.parallelism.layout import splits_backward
from gptlite.plan.config import ClusterConfig
from gptlite.plan.cost_block import ModelSeconds, Part, Passes, model_seconds, plain_profile
from gptlite.plan.cost_device import Device, device_of, ranks_on_node, waiting_for_cores
from gptlite.plan.cost_links import Links
from gptlite.plan.cost_offload import offloaded
from gptlite.plan.cost_pipeline import busy, pipeline_seconds
from gptlite.plan.memory import most
from gptlite.plan.parameters import Alike, Cut, cut, num_blocks, stages
from gptlite.plan.traffic import message_bytes, outside_layers, reductions
from gptlite.plan.workload import Prediction, RankBytes, Transfer, Workload

DATA = ("dp_replicate", "dp_shard")
COPIES = 2  # times that FSDP2 reads and writes what it gathers or reduces
COPY_OPS = 12  # kernels of one of its collectives


def predict(work: Workload, cluster: ClusterConfig, memory: tuple[int, RankBytes] | None = None) -> Prediction:
    """The step of a run on that cluster. Raises ConfigError for a dtype that the cluster has no peak of.

    `memory`: what `memory.most` says of it, for who has asked already.
    """
    return predict_shared(work, cluster, memory or most(work), Shared())


def predict_shared(work: Workload, cluster: ClusterConfig, memory: tuple[int, RankBytes], shared: Shared) -> Prediction:
    """As `predict`, with what other layouts of the same search have in common with it."""
    world = work.layout.world_size
    pipeline = cut(work)
    ranks = _ranks(work, cluster, shared)
    slowest = max(ranks.values(), key=lambda its: its.passes.forward + its.passes.backward)
    there, back = _stages(ranks, pipeline)
    count = work.micro_batches
    whole = pipeline_seconds(work.parallelism, count, there, back, _message(work, cluster))
    work_of = busy(work.parallelism, there, back)
    # Ranks that take turns on a core compute in each other's bubbles; a sum over some waits until all had their turn.
    waiting = waiting_for_cores(cluster, world)
    kinds = [ranks[kind] for kind in pipeline.kinds]
    computing = sum(seconds - its.tensor for seconds, its in zip(work_of, kinds, strict=True)) / len(kinds)
    if waiting > 1:
        whole = max(whole, count * (waiting * computing + slowest.tensor))
    own = min(whole, waiting * count * max(work_of))
    data = max(its.data for its in ranks.values())
    update = waiting * max(its.update for its in ranks.values())
    tensor = min(own, count * slowest.tensor)
    step = whole + data + update
    tokens = work.tokens / step
    rank, most_bytes = memory
    return Prediction(
        step_seconds=step,
        compute_seconds=own - tensor,
        communication_seconds=tensor + data,
        bubble_seconds=whole - own,
        optimizer_seconds=update,
        tokens_per_second=tokens,
        mfu=tokens * flops_per_token(work) / peak_flops(cluster, work.dtype, world),
        memory=most_bytes,
        memory_rank=rank,
    )


def stage_seconds(work: Workload, cluster: ClusterConfig) -> tuple[list[float], list[float], float]:
    """Seconds of a micro-batch's forward and backward pass in each stage, and of a message: what a timeline takes."""
    there, back = _stages(_ranks(work, cluster, Shared()), cut(work))
    return there, back, _message(work, cluster)


def peak_flops(cluster: ClusterConfig, dtype: str, world: int) -> float:
    """FLOP/s by data sheet of the devices that so many ranks use: of whole nodes, on a CPU."""
    devices = cluster.nodes or 1 if cluster.device == "cpu" else world
    return cluster.peak_tflops[dtype] * 1e12 * devices


def days_to_train(tokens: float, prediction: Prediction) -> float:
    """Days that so many tokens take."""
    return tokens / prediction.tokens_per_second / 86400


def cost_per_billion_tokens(prediction: Prediction, cluster: ClusterConfig, world: int) -> float | None:
    """Dollars for a billion tokens on `world` ranks; None where the cluster has no price. A CPU's is the node's."""
    if cluster.dollars_per_device_hour is None:
        return None
    devices = world if cluster.device == "cuda" else -(-world // ranks_on_node(cluster, world))
    return devices * cluster.dollars_per_device_hour * 1e9 / prediction.tokens_per_second / 3600


def flops_per_token(work: Workload) -> float:
    """FLOPs of a token, forward and backward, recomputation left out: by the model's own count, else by its ops."""
    blocks = num_blocks(work.model)
    if (found := spec_of(work.model).flops(work.model, work.sequence_length)) is not None:
        return blocks * found[0] + found[1]
    its = plain_profile(work)
    ends, block = (
        sum(op.flops for segment in segments for op in segment.ops)
        for segments in ((its.begin, its.begin_back, its.end, its.end_back), (its.block, its.block_back))
    )
    return (ends + blocks * block) * work.layout.size("tp") / work.rank_tokens


@dataclass(frozen=True)
class _Inside:
    """What a rank does in its layers, a micro-batch: `tensor` is exposed communication along the tensor axis, which
    `passes` is without. `parameters`: those it holds."""

    layers: int
    passes: Passes
    tensor: Passes
    parameters: int


@dataclass(frozen=True)
class _Outside:
    """Seconds of a step's collectives beside layers, all of them, by what they can hide behind; and the bytes that
    FSDP2 copies for them, in how many collectives. `again`: seconds, bytes and collectives of reducing once more."""

    step: float
    forward: float
    backward: float
    copied: int
    count: int
    again: tuple[float, int, int]

    def reducing(self, times: int) -> _Outside:
        """With each gradient reduced so often."""
        seconds, copied, count = ((times - 1) * each for each in self.again)
        return replace(self, backward=self.backward + seconds, copied=self.copied + copied, count=self.count + count)


@dataclass
class Shared:
    """What the layouts of one search have in common: of one model, batch, cluster and world."""

    model: dict[tuple[object, ...], ModelSeconds] = field(default_factory=dict)
    inside: dict[tuple[object, ...], _Inside] = field(default_factory=dict)
    outside: dict[tuple[object, ...], _Outside] = field(default_factory=dict)


@dataclass(frozen=True)
class _Rank:
    """One pipeline rank: seconds of a micro-batch in all its stages, `tensor` of them exposed communication along the
    tensor axis; `data` exposed communication of a step, `update` the optimizer's."""

    layers: int
    passes: Passes
    tensor: float
    data: float
    update: float


def _ranks(work: Workload, cluster: ClusterConfig, shared: Shared) -> dict[Alike, _Rank]:
    """A pipeline rank of each kind."""
    device, links = device_of(cluster, work.dtype, work.layout.world_size), Links(cluster, work.layout)
    found = {}
    for kind, rank in cut(work).first.items():
        inside, outside = _inside_key(work, kind), _outside_key(work, kind, rank)
        if inside not in shared.inside:
            model = _model_key(work)
            if model not in shared.model:
                shared.model[model] = model_seconds(work, device, links)
            shared.inside[inside] = _inside(work, cluster, device, rank, shared.model[model])
        if outside not in shared.outside:
            shared.outside[outside] = _outside(work, links, rank)
        beside = shared.outside[outside].reducing(reductions(work))
        found[kind] = _rank(work, cluster, device, rank, shared.inside[inside], beside)
    return found


def _inside_key(work: Workload, kind: Alike) -> tuple[object, ...]:
    """What `_inside` reads, of what a search varies."""
    split = splits_backward(work.parallelism)
    return *_model_key(work), work.micro_batches, split, sum(kind[0]), *kind[1:]


def _model_key(work: Workload) -> tuple[object, ...]:
    """What `model_seconds` reads, of what a search varies."""
    config, layout = work.parallelism, work.layout
    degrees = layout.size("tp"), layout.context, layout.size("pp") == 1, config.sequence
    return *degrees, config.activation_checkpointing, work.micro_batch_size, work.sharded


def _outside_key(work: Workload, kind: Alike, rank: int) -> tuple[object, ...]:
    """What `_outside` reads, of what a search varies: a schedule only where parameters are gathered for each pass."""
    config = work.parallelism
    order = (config.schedule, rank, work.micro_batches) if config.zero == 3 else ()
    return work.layout, config.sequence, kind, order


def _inside(work: Workload, cluster: ClusterConfig, device: Device, rank: int, its: ModelSeconds) -> _Inside:
    held = stages(work, rank)
    layers = sum(stage.layers for stage in held)
    whole = Part().plus(its.block, layers)
    for stage in held:
        whole = whole.plus(its.begin, stage.first).plus(its.end, stage.last)
    parameters = sum(parameter.elements for stage in held for parameter in stage.parameters())
    # The sum over micro-batches is read and written, and a gradient read; the first is only written.
    summed = (2 * work.reduce_item + work.gather_item) * (work.micro_batches - 1) / work.micro_batches
    passes = whole.ops.plus(Passes(0.0, device.move(summed * parameters, 8 * layers)))
    return _Inside(layers, passes, _exposed(work, cluster, whole, passes), parameters)


def _outside(work: Workload, links: Links, rank: int) -> _Outside:
    sent = outside_layers(work, stages(work, rank))
    data = [each for each in sent if each.axis in DATA]
    step, forward, backward = (
        sum(links.seconds(each) for each in some if each.phase == phase)
        for some, phase in ((sent, "step"), (data, "forward"), (data, "backward"))
    )
    again = [each for each in data if each.kind == "reduce_scatter"]
    more = sum(map(links.seconds, again)), _copied(again), sum(each.count for each in again)
    return _Outside(step, forward, backward, _copied(data), sum(each.count for each in data), more)


def _copied(sent: list[Transfer]) -> int:
    return sum(COPIES * each.payload * each.count for each in sent if each.phase != "step")


def _rank(
    work: Workload, cluster: ClusterConfig, device: Device, rank: int, inside: _Inside, outside: _Outside
) -> _Rank:
    passes, layers = inside.passes, inside.layers
    exposed = inside.tensor.forward + inside.tensor.backward
    copies = device.move(outside.copied, COPY_OPS * outside.count)
    waiting = waiting_for_cores(cluster, work.layout.world_size)
    data = _data(work, cluster, outside, passes) + waiting * copies
    shard = inside.parameters / (work.layout.size("dp_shard") if work.parallelism.zero else 1)
    update = device.move(work.optimizer.update_bytes * shard, 12 * (layers + 1))
    computing = work.micro_batches * (passes.forward + passes.backward)
    offload, update = offloaded(work, cluster, device, rank, computing, update)
    return _Rank(layers, passes.plus(inside.tensor), exposed, data + offload, update)


def _exposed(work: Workload, cluster: ClusterConfig, whole: Part, passes: Passes) -> Passes:
    """Communication inside of layers that shows, of one micro-batch: along the tensor axis, and of keys and values, for
    which attention waits.

    The backward pass of a column-parallel layer sums its input's gradient, and gathers its input once more, while it
    computes: all of the backward traffic without sequence parallelism, two thirds of it with.
    """
    config, sent = work.parallelism, whole.tensor
    share = 0.0 if splits_backward(config) else 2 / 3 if config.sequence else 1.0
    hidden = cluster.overlap * min(sent.backward * share, passes.forward / 2) if share else 0.0
    return sent.plus(whole.context).plus(Passes(0.0, -hidden))


def _data(work: Workload, cluster: ClusterConfig, outside: _Outside, passes: Passes) -> float:
    """Exposed communication along the data axes and of a step as a whole.

    What is gathered before a pass, and reduced after it, can hide behind as many passes as it is done in: with ZeRO 3
    all of them, with ZeRO 2 all backward ones, else the first forward and the last backward one.
    """
    zero, count = work.parallelism.zero, work.micro_batches
    total = outside.step
    for its, seconds, often in (
        (outside.forward, passes.forward, zero == 3),
        (outside.backward, passes.backward, zero >= 2),
    ):
        total += its - min(cluster.overlap * its, seconds * (count if often else 1))
    return total


def _stages(ranks: dict[Alike, _Rank], pipeline: Cut) -> tuple[list[float], list[float]]:
    """Seconds of a micro-batch's forward and backward pass in each stage: its share of its rank's, by layers."""
    layers = pipeline.layers
    there, back = [0.0] * len(layers), [0.0] * len(layers)
    for kind, held in zip(pipeline.kinds, pipeline.stages, strict=True):
        its = ranks[kind]
        for stage in held:
            share = len(layers[stage]) / its.layers
            there[stage], back[stage] = its.passes.forward * share, its.passes.backward * share
    return there, back


def _message(work: Workload, cluster: ClusterConfig) -> float:
    """One activation from a pipeline rank to the next."""
    links = Links(cluster, work.layout)
    payload = message_bytes(work)
    return links.once("send", payload, links.group("pp")) if payload else 0.0
