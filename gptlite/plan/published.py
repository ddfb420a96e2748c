"""The cost model on the stacks that others have published speeds of: Megatron-LM in 2021 and in 2020.

The same functions as for our own runs price every product, pointwise op and collective; what differs is what those code
bases ran, as their papers and scripts describe them: which pointwise ops are fused, what is recomputed (everything),
what overlaps (torch's data parallelism alone), in what dtype gradients travel (fp16).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any

from gptlite.parallelism.config import ParallelismConfig
from gptlite.plan.config import ClusterConfig, LinkConfig
from gptlite.plan.cost_block import FULL, Passes, Piece, Stack, Traffic, block, block_parameters, head
from gptlite.plan.cost_device import Device, device_of
from gptlite.plan.cost_links import Group, Links
from gptlite.plan.cost_pipeline import busy, pipeline_seconds
from gptlite.plan.published_rows import MEGATRON, Row

FP16 = 2
# What an ablation can leave out.
TERMS = ("recomputation", "bubble", "elementwise", "collectives", "shared links")
CLUSTERS = {"megatron": "dgx-a100", "deepspeed": "dgx-2-v100"}

# Megatron-LM 2021, dropout 0.1. A block's forward ops: two norms (2 widths each), two fused bias-dropout-add (read x
# and the residual, write the sum and half a width of mask: 3.5); fused bias-GELU; attention's output made contiguous;
# fused scale-mask-softmax (2) and its dropout (2.5). Backward: norms 5 each (two passes over what came in), dropout
# 2.5, the residual branches' gradients added (3 each) and summed for biases; GELU 3 + 1; three gradients put together.
# Gradients are added in fp16 (6 bytes). The optimizer copies to fp32, unscales, takes the norm, clips, updates, copies.
MEGATRON_2021 = Stack(
    forward=Traffic(width=11, heads=2, inner=2, scores=4.5, ops=9),
    backward=Traffic(width=23, heads=11, inner=4, scores=5.5, ops=20),
    fused_attention=False,
    causal=1.0,
    logit=60,
    gradient=6,
    optimizer=60,
)
# Megatron-LM as of early 2020: bias, dropout and residual apart (9.5 widths a pair with the norm), biases copied into
# outputs before the product, heads made contiguous, and scores scaled, masked by a product and a sum, normalised and
# dropped in an op each.
MEGATRON_2020 = Stack(
    forward=Traffic(width=19, heads=14, inner=4, scores=10.5, ops=24),
    backward=Traffic(width=23, heads=17, inner=4, scores=9.5, ops=34),
    fused_attention=False,
    causal=1.0,
    logit=60,
    gradient=6,
    optimizer=60,
)


@dataclass(frozen=True)
class Step:
    """Seconds of a published run's step by the model; `bubble` is part of no other."""

    compute: float
    tensor: float
    messages: float
    data: float
    optimizer: float
    bubble: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


def preset(name: str) -> ClusterConfig:
    """The cluster of conf/cluster/<name>.yaml, without composing a configuration."""
    from yaml import safe_load

    raw: dict[str, Any] = safe_load(
        files("gptlite.conf").joinpath("cluster", f"{name}.yaml").read_text(encoding="utf-8")
    )
    raw.pop("defaults")
    raw |= {key: LinkConfig(**raw[key]) for key in ("intra", "inter") if key in raw}
    return ClusterConfig(**raw)


def report() -> str:
    """docs/planner_published.md, anew."""
    from gptlite.plan.published_report import report as write_report

    return write_report()


def error(row: Row, cluster: ClusterConfig, off: frozenset[str] = frozenset()) -> float:
    """Predicted over measured throughput, less 1. `off`: terms of TERMS left out of the model."""
    return row.seconds / step(row, cluster, off).seconds - 1


def step(row: Row, cluster: ClusterConfig, off: frozenset[str] = frozenset()) -> Step:
    """A step of a published run. `off`: terms of TERMS left out of the model."""
    assert off <= set(TERMS), off
    world = row.layout.world_size
    device, links = device_of(cluster, "fp16", world), Links(cluster, row.layout, "shared links" not in off)
    parts = _Parts(row, device, links, off)
    ranks, count = row.layout.size("pp"), row.global_batch // (row.micro_batch * row.layout.data_size)
    config = ParallelismConfig(
        pipeline=ranks,
        tensor=row.layout.size("tp"),
        schedule="interleaved_1f1b" if row.virtual > 1 else "1f1b",
        virtual_stages=row.virtual,
    )
    # Megatron waits for each message: they are part of the passes.
    passes = parts.stages()
    there, back = [each.forward for each in passes], [each.backward for each in passes]
    slowest = count * max(busy(config, there, back))
    whole = slowest if "bubble" in off else pipeline_seconds(config, count, there, back, 0.0)
    tensor, messages = count * parts.tensor(), count * parts.messages()
    data = parts.data(passes[0].backward * row.virtual)
    return Step(slowest - tensor - messages, tensor, messages, data, parts.optimizer(), whole - slowest)


def memory_gib(row: Row) -> float:
    """What the fullest rank takes: fp16 parameters and gradients (4 bytes a parameter) and the optimizer's 12, which
    ZeRO cuts; each block's input of the micro-batches in flight; one block at work (Korthikanti et al. 2022,
    arXiv:2205.05198); or, on the last rank, the logits in fp16 and twice in fp32."""
    model, piece = row.model, Piece(row.micro_batch, row.model.sequence_length, row.layout.size("tp"))
    ranks, count = row.layout.size("pp"), row.global_batch // (row.micro_batch * row.layout.data_size)
    started = ranks if row.virtual == 1 else (2 * (ranks - 1) + (row.virtual - 1) * ranks + 1) / row.virtual
    held = FP16 * piece.tokens * model.d_model * model.num_layers / ranks
    state = parameters(row) * (2 * FP16 + 12 / row.layout.size("dp_shard"))
    scores = 5 * model.num_heads * piece.length / model.d_model
    working = piece.tokens * model.d_model * (10 + (24 + scores) / piece.tensor)
    logits = 10 * piece.tokens * model.padded_vocab_size / piece.tensor
    first, last = min(started, count) * held + working, min(1, count) * held + max(working, logits)
    return (state + max(first, last)) / 2**30


def parameters(row: Row) -> float:
    """Of the first pipeline rank, with the embeddings."""
    model, tensor = row.model, row.layout.size("tp")
    blocks = model.num_layers / row.layout.size("pp") * block_parameters(model, tensor)
    return blocks + model.d_model * (model.padded_vocab_size / tensor + model.sequence_length)


@dataclass(frozen=True)
class _Parts:
    """The terms of one run."""

    row: Row
    device: Device
    links: Links
    off: frozenset[str]

    def __post_init__(self) -> None:
        assert self.row.model.num_layers % (self.row.layout.size("pp") * self.row.virtual) == 0

    @property
    def stack(self) -> Stack:
        """Whose code ran."""
        return MEGATRON_2021 if self.row.table == MEGATRON else MEGATRON_2020

    @property
    def piece(self) -> Piece:
        """A micro-batch."""
        row = self.row
        return Piece(row.micro_batch, row.model.sequence_length, row.layout.size("tp"))

    @property
    def pointwise(self) -> bool:
        """Whether bytes that are not a product's count."""
        return "elementwise" not in self.off

    def stages(self) -> list[Passes]:
        """A micro-batch's passes in each stage, with their communication."""
        row, model, piece = self.row, self.row.model, self.piece
        stages = row.layout.size("pp") * row.virtual
        recompute = "none" if "recomputation" in self.off else FULL
        layers = model.num_layers // stages
        summed = self._sum()
        its = block(model, piece, self.stack, self.device, recompute, self.pointwise)
        its += Passes(2 * summed, (2 if recompute == "none" else 4) * summed)
        message = self._message()
        adding = self._grown(self.stack.gradient * layers * block_parameters(model, piece.tensor))
        stage = its.times(layers) + Passes(message, message + adding)
        last = stage + head(model, piece, self.stack, self.device, self.pointwise) + Passes(0.0, summed)
        return [stage] * (stages - 1) + [last]

    def tensor(self) -> float:
        """Sums over the tensor axis on the last rank, of one micro-batch."""
        layers = self.row.model.num_layers // self.row.layout.size("pp")
        each = 4 if "recomputation" in self.off else 6
        return (each * layers + 1) * self._sum()

    def messages(self) -> float:
        """Between pipeline ranks, of one micro-batch."""
        return 2 * self.row.virtual * self._message()

    def data(self, last_backward: float) -> float:
        """The reduction of gradients (ZeRO's reduces and gathers as much), and the tied embedding's over the ends."""
        if "collectives" in self.off:
            return 0.0
        row, links = self.row, self.links
        axis = "dp_shard" if row.zero else "dp_replicate"
        seconds = links.once("all_reduce", FP16 * parameters(row), links.group(axis)) if row.layout.data_size > 1 else 0
        if row.torch_ddp:
            seconds -= min(links.cluster.overlap * seconds, last_backward)
        if row.layout.size("pp") > 1:
            table = FP16 * row.model.padded_vocab_size * row.model.d_model / row.layout.size("tp")
            seconds += links.once("all_reduce", table, Group(2, 1, 2))
        return seconds

    def optimizer(self) -> float:
        """The update, of a shard with ZeRO."""
        shards = self.row.layout.size("dp_shard")
        return self._grown(self.stack.optimizer * parameters(self.row) / shards)

    def _sum(self) -> float:
        """One sum of activations over the tensor axis."""
        if self.piece.tensor == 1 or "collectives" in self.off:
            return 0.0
        payload = FP16 * self.piece.tokens * self.row.model.d_model
        return self.links.once("all_reduce", payload, self.links.group("tp"))

    def _message(self) -> float:
        """An activation to the next pipeline rank: each tensor rank sends its part, then they gather."""
        if self.row.layout.size("pp") == 1 or "collectives" in self.off:
            return 0.0
        payload = FP16 * self.piece.tokens * self.row.model.d_model
        sent = self.links.once("send", payload / self.piece.tensor, self.links.group("pp"))
        return sent + self.links.once("all_gather", payload, self.links.group("tp"))

    def _grown(self, moved: float) -> float:
        return self.device.move(moved) if self.pointwise else 0.0
