"""How long a step of a run takes, before it runs: products by their shapes, pointwise ops by their bytes, collectives
by ring over the links they cross, the pipeline's bubble in closed form, and what of it hides behind what.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gptlite.models.gpt.flops import flops_per_token
from gptlite.ops.config import Attention
from gptlite.optimizer.config import AdafactorConfig, AdamW8bitConfig, LambConfig, LionConfig, MuonConfig, SGDConfig
from gptlite.parallelism.layout import CONTEXT, splits_backward
from gptlite.plan.config import ClusterConfig
from gptlite.plan.cost_block import Passes, Piece, Stack, Traffic, block, block_parameters, head
from gptlite.plan.cost_device import Device, device_of, ranks_on_node, waiting_for_cores
from gptlite.plan.cost_links import Links
from gptlite.plan.cost_offload import offloaded
from gptlite.plan.cost_pipeline import busy, pipeline_seconds
from gptlite.plan.memory import most
from gptlite.plan.parameters import Alike, Cut, cut, stages
from gptlite.plan.traffic import inside_layers, outside_layers
from gptlite.plan.workload import Prediction, RankBytes, Transfer, Workload

DATA = ("dp_replicate", "dp_shard")
WRITTEN_OUT = (Attention.matmul, Attention.fused_softmax)
QUERY_BLOCK = 256  # queries that matmul attention takes at a time, see ops/attention.py
# Bytes that the clipping and the update read and write for each parameter: Adam's in one kernel, those written here op
# by op. What Muon multiplies and sends is left out.
ADAM_UPDATE = 40
UPDATE = {SGDConfig: 24, AdamW8bitConfig: 28, LionConfig: 64, MuonConfig: 84, AdafactorConfig: 88, LambConfig: 128}
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
        mfu=tokens * flops_per_token(work.model, work.sequence_length) / peak_flops(cluster, work.dtype, world),
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


def stack_of(work: Workload) -> Stack:
    """Our own blocks, counted from model/gpt.py: norms (2 widths, with the residual 4), residual sums (3), biases.

    Row-parallel biases are ops of their own (2 widths each), column-parallel ones too (6 of `heads`). Backward: norms 5
    each, sums of gradients, GELU 3, biases. Gradients accumulate in fp32. Dropout reads, writes and keeps a mask.
    """
    cut, attention, drops = work.layout.size("tp") > 1, work.attention, work.model.dropout > 0
    written = attention in WRITTEN_OUT
    packed = attention is Attention.fused
    mask = 2.5 if drops else 0.0
    accumulated = 12 * (work.micro_batches - 1) / work.micro_batches + (0 if work.dtype == "fp32" else 6)
    return Stack(
        forward=Traffic(
            width=9 + 4 * cut + 2 * mask,
            heads=6 * cut + (0 if packed else 8 if written else 2),
            inner=2,
            scores=(2 + mask if written else 0) * _causal(work),
            ops=14 + 4 * cut + 4 * written,
        ),
        backward=Traffic(
            width=18 + 2 * mask,
            heads=3 if packed else 9,
            inner=4,
            scores=((5 if work.sequence_length > QUERY_BLOCK else 3) + mask if written else 0) * _causal(work),
            ops=26 + 4 * written,
        ),
        fused_attention=not written,
        causal=_causal(work),
        logit=8 * work.itemsize,
        gradient=accumulated,
        optimizer=UPDATE.get(type(work.optimizer), ADAM_UPDATE),
    )


def _causal(work: Workload) -> float:
    """Share of the scores that attention computes."""
    ranks = work.layout.context
    # Of a chunk's queries nobody computes what comes after the chunk; a mask that is given hides the rest of it.
    boxes = (1 + 1 / (2 * ranks)) / 2
    if work.attention is Attention.fused_softmax:
        return 1.0 if ranks == 1 else boxes
    if work.attention is Attention.matmul:
        return (1 + min(1 / (2 * ranks) if ranks > 1 else 1.0, QUERY_BLOCK / work.sequence_length)) / 2
    return 0.5 if ranks == 1 or work.attention is Attention.fused else boxes


@dataclass(frozen=True)
class _Inside:
    """What a rank does in its layers, a micro-batch: `tensor` is exposed communication along the tensor axis, which
    `passes` is without. `parameters`: those it holds."""

    layers: int
    passes: Passes
    tensor: Passes
    parameters: float
    optimizer: float  # bytes of each parameter that it updates


@dataclass(frozen=True)
class _Outside:
    """Seconds of a step's collectives beside layers, all of them, by what they can hide behind; and the bytes that
    FSDP2 copies for them, in how many collectives."""

    step: float
    forward: float
    backward: float
    copied: int
    count: int


@dataclass
class Shared:
    """What the layouts of one search have in common: of one model, batch, cluster and world."""

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
            shared.inside[inside] = _inside(work, cluster, device, links, rank)
        if outside not in shared.outside:
            shared.outside[outside] = _outside(work, links, rank)
        found[kind] = _rank(work, cluster, device, rank, shared.inside[inside], shared.outside[outside])
    return found


def _inside_key(work: Workload, kind: Alike) -> tuple[object, ...]:
    """What `_inside` reads, of what a search varies."""
    config, split = work.parallelism, splits_backward(work.parallelism)
    held = kind if split else (sum(kind[0]), *kind[1:])  # of halves of passes the first stage has fewer
    degrees = work.layout.size("tp"), work.layout.context, config.sequence, config.activation_checkpointing
    return *degrees, work.micro_batch_size, work.micro_batches, work.sharded, split, held


def _outside_key(work: Workload, kind: Alike, rank: int) -> tuple[object, ...]:
    """What `_outside` reads, of what a search varies: a schedule only where parameters are gathered for each pass."""
    config, count = work.parallelism, work.micro_batches
    order = (config.schedule, rank) if config.zero == 3 else ()
    return work.layout, config.zero, config.sequence, count, kind, order


def _inside(work: Workload, cluster: ClusterConfig, device: Device, links: Links, rank: int) -> _Inside:
    model, config, held = work.model, work.parallelism, stages(work, rank)
    first, last = held[0].first, any(stage.last for stage in held)
    layers, ranks = sum(stage.layers for stage in held), work.layout.size("tp")
    stack = stack_of(work)
    piece = Piece(work.micro_batch_size, work.rank_length, ranks, config.sequence, work.layout.context)
    passes = block(model, piece, stack, device, config.activation_checkpointing.value).times(layers)
    if last:
        passes += head(model, piece, stack, device)
    table = model.padded_vocab_size / ranks * model.d_model
    tables = first + (last and not (model.tied_embeddings and first))
    parameters = layers * block_parameters(model, ranks) + tables * table
    moved = stack.gradient * parameters + first * 8 * table  # the embedding's gradient is dense
    passes += Passes(0.0, device.move(moved, 8 * layers))
    tensor = _tensor(work, cluster, links, inside_layers(work, held), passes)
    return _Inside(layers, passes, tensor, parameters, stack.optimizer)


def _outside(work: Workload, links: Links, rank: int) -> _Outside:
    sent = outside_layers(work, stages(work, rank))
    data = [each for each in sent if each.axis in DATA]
    step, forward, backward = (
        sum(links.seconds(each) for each in some if each.phase == phase)
        for some, phase in ((sent, "step"), (data, "forward"), (data, "backward"))
    )
    copied = sum(COPIES * each.payload * each.count for each in data if each.phase != "step")
    return _Outside(step, forward, backward, copied, sum(each.count for each in data))


def _rank(
    work: Workload, cluster: ClusterConfig, device: Device, rank: int, inside: _Inside, outside: _Outside
) -> _Rank:
    passes, layers = inside.passes, inside.layers
    exposed = inside.tensor.forward + inside.tensor.backward
    copies = device.move(outside.copied, COPY_OPS * outside.count)
    waiting = waiting_for_cores(cluster, work.layout.world_size)
    data = _data(work, cluster, outside, passes) + waiting * copies
    shard = inside.parameters / (work.layout.size("dp_shard") if work.parallelism.zero else 1)
    update = device.move(inside.optimizer * shard, 12 * (layers + 1))
    computing = work.micro_batches * (passes.forward + passes.backward)
    offload, update = offloaded(work, cluster, device, rank, computing, update)
    return _Rank(layers, passes + inside.tensor, exposed, data + offload, update)


def _tensor(work: Workload, cluster: ClusterConfig, links: Links, sent: list[Transfer], passes: Passes) -> Passes:
    """Exposed communication inside of layers, of one micro-batch: along the tensor axis, and of keys and values, for
    which attention waits.

    The backward pass of a column-parallel layer sums its input's gradient, and gathers its input once more, while it
    computes: all of the backward traffic without sequence parallelism, two thirds of it with.
    """
    config = work.parallelism
    there, back, keys_there, keys_back = (
        sum(links.seconds(each) for each in sent if each.axis == axis and each.phase == phase) / work.micro_batches
        for axis in ("tp", CONTEXT)
        for phase in ("forward", "backward")
    )
    split = splits_backward(config)
    hidden = 0.0 if split else cluster.overlap * min(back * (2 / 3 if config.sequence else 1), passes.forward / 2)
    return Passes(there + keys_there, back + keys_back - hidden)


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
    if work.layout.size("pp") == 1:
        return 0.0
    between = work.layout.size("tp") if work.parallelism.sequence else 1
    payload = work.micro_batch_size * work.rank_length // between * work.model.d_model * work.stream_item
    links = Links(cluster, work.layout)
    return links.once("send", payload, links.group("pp"))
