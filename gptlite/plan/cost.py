"""How long a step of a run takes, before it runs: products by their shapes, pointwise ops by their bytes, collectives
by ring over the links they cross, the pipeline's bubble in closed form, and what of it hides behind what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gptlite.model.flops import flops_per_token
from gptlite.ops.config import Attention
from gptlite.optimizer.config import AdafactorConfig, AdamW8bitConfig, LambConfig, LionConfig, MuonConfig, SGDConfig
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import CONTEXT, num_stages, splits_backward, stages_of_rank
from gptlite.plan.config import ClusterConfig
from gptlite.plan.cost_block import Passes, Piece, Stack, Traffic, block, block_parameters, head
from gptlite.plan.cost_device import Device, device_of, ranks_on_node, waiting_for_cores
from gptlite.plan.cost_links import Links
from gptlite.plan.cost_offload import offloaded
from gptlite.plan.cost_pipeline import busy, pipeline_seconds
from gptlite.plan.memory import most
from gptlite.plan.parameters import stage_layers
from gptlite.plan.traffic import transfers
from gptlite.plan.workload import Prediction, RankBytes, Transfer, Workload

Kind = tuple[tuple[int, ...], bool, bool]  # of a pipeline rank, see _kind
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
    world = work.layout.world_size
    device, layers = device_of(cluster, work.dtype, world), _layers(work)
    ranks = {kind: _rank(work, cluster, device, rank, layers) for kind, rank in _different(work, layers).items()}
    slowest = max(ranks.values(), key=lambda its: its.passes.forward + its.passes.backward)
    there, back = _stages(work, ranks, layers)
    count = work.micro_batches
    whole = pipeline_seconds(work.parallelism, count, there, back, _message(work, cluster))
    work_of = busy(work.parallelism, there, back)
    # Ranks that take turns on a core compute in each other's bubbles; a sum over some waits until all had their turn.
    waiting = waiting_for_cores(cluster, world)
    kinds = [ranks[_kind(work.parallelism, rank, layers)] for rank in range(work.parallelism.pipeline)]
    computing = sum(seconds - its.tensor for seconds, its in zip(work_of, kinds, strict=True)) / len(kinds)
    if waiting > 1:
        whole = max(whole, count * (waiting * computing + slowest.tensor))
    own = min(whole, waiting * count * max(work_of))
    data = max(its.data for its in ranks.values())
    update = waiting * max(its.update for its in ranks.values())
    tensor = min(own, count * slowest.tensor)
    step = whole + data + update
    tokens = work.tokens / step
    rank, most_bytes = memory or most(work)
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
    layers = _layers(work)
    device = device_of(cluster, work.dtype, work.layout.world_size)
    ranks = {kind: _rank(work, cluster, device, rank, layers) for kind, rank in _different(work, layers).items()}
    there, back = _stages(work, ranks, layers)
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
class _Rank:
    """One pipeline rank: seconds of a micro-batch in all its stages, `tensor` of them exposed communication along the
    tensor axis; `data` exposed communication of a step, `update` the optimizer's."""

    layers: int
    passes: Passes
    tensor: float
    data: float
    update: float


def _different(work: Workload, layers: Sequence[range]) -> dict[Kind, int]:
    """A pipeline rank of each kind."""
    config = work.parallelism
    return {_kind(config, rank, layers): rank for rank in range(config.pipeline)}


def _kind(config: ParallelismConfig, rank: int, layers: Sequence[range]) -> Kind:
    """Ranks that hold as many layers and the same ends do the same work."""
    mine = stages_of_rank(config, rank)
    return tuple(len(layers[stage]) for stage in mine), 0 in mine, len(layers) - 1 in mine


def _layers(work: Workload) -> Sequence[range]:
    """The layers of each stage, as model/parallelize.py cuts them."""
    return stage_layers(work.model, num_stages(work.parallelism))


def _rank(work: Workload, cluster: ClusterConfig, device: Device, rank: int, layers: Sequence[range]) -> _Rank:
    model, config = work.model, work.parallelism
    mine, last = stages_of_rank(config, rank), len(layers) - 1
    held = sum(len(layers[stage]) for stage in mine)
    stack, links = stack_of(work), Links(cluster, work.layout)
    ranks = work.layout.size("tp")
    piece = Piece(work.micro_batch_size, work.rank_length, ranks, config.sequence, work.layout.context)
    passes = block(model, piece, stack, device, config.activation_checkpointing.value).times(held)
    if last in mine:
        passes += head(model, piece, stack, device)
    table = model.padded_vocab_size / ranks * model.d_model
    tables = (0 in mine) + (last in mine and not (model.tied_embeddings and 0 in mine))
    parameters = held * block_parameters(model, ranks) + tables * table
    moved = stack.gradient * parameters + (0 in mine) * 8 * table  # the embedding's gradient is dense
    passes += Passes(0.0, device.move(moved, 8 * held))
    sent = transfers(work, rank)
    tensor = _tensor(work, cluster, links, sent, passes)
    exposed = tensor.forward + tensor.backward
    copied = sum(COPIES * each.payload * each.count for each in sent if each.axis in DATA and each.phase != "step")
    copies = device.move(copied, COPY_OPS * sum(each.count for each in sent if each.axis in DATA))
    waiting = waiting_for_cores(cluster, work.layout.world_size)
    data = _data(work, cluster, links, sent, passes) + waiting * copies
    shard = parameters / (work.layout.size("dp_shard") if config.zero else 1)
    update = device.move(stack.optimizer * shard, 12 * (held + 1))
    computing = work.micro_batches * (passes.forward + passes.backward)
    offload, update = offloaded(work, cluster, device, rank, computing, update)
    return _Rank(held, passes + tensor, exposed, data + offload, update)


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


def _data(work: Workload, cluster: ClusterConfig, links: Links, sent: list[Transfer], passes: Passes) -> float:
    """Exposed communication along the data axes and of a step as a whole.

    What is gathered before a pass, and reduced after it, can hide behind as many passes as it is done in: with ZeRO 3
    all of them, with ZeRO 2 all backward ones, else the first forward and the last backward one.
    """
    zero, count = work.parallelism.zero, work.micro_batches
    total = sum(links.seconds(each) for each in sent if each.phase == "step")
    for phase, seconds, often in (("forward", passes.forward, zero == 3), ("backward", passes.backward, zero >= 2)):
        its = sum(links.seconds(each) for each in sent if each.axis in DATA and each.phase == phase)
        total += its - min(cluster.overlap * its, seconds * (count if often else 1))
    return total


def _stages(work: Workload, ranks: dict[Kind, _Rank], layers: Sequence[range]) -> tuple[list[float], list[float]]:
    """Seconds of a micro-batch's forward and backward pass in each stage: its share of its rank's, by layers."""
    config = work.parallelism
    there, back = [0.0] * len(layers), [0.0] * len(layers)
    for rank in range(config.pipeline):
        its = ranks[_kind(config, rank, layers)]
        for stage in stages_of_rank(config, rank):
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
