"""The layouts that are compared with one process: a covering choice of the legal ones, and what each rank runs.

The reference of a cell is the same run on one process. It depends on the model alone: the global batch holds the same
samples however it is cut, and dropout is drawn from their numbers.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from typing import Any

from gptlite.checks import check_world
from gptlite.config import load
from gptlite.errors import ConfigError
from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import schedule_refuses

GLOBAL_BATCH = 48
STEPS = 5
MOST_MESSAGES = 16  # tensor ranks x micro-batches: eight ranks on two cores take long for more
# Eight layers, so that zbv has its eight stages on four ranks (half of them where the pipeline is short); eight heads
# for eight tensor ranks. The learning rate is the one of a warm-up: at its peak in the first step, Adam makes 5e-5 of a
# gradient out of rounding. Clipping and weight decay are strong enough to be seen beside the tolerances.
BASE = f"""
data=synthetic data.vocab_size=37 data.num_tokens=20000 data.global_batch_size={GLOBAL_BATCH} trainer.max_steps=1000
model.num_layers=8 model.num_heads=8 model.d_model=32 model.sequence_length=16 model.dropout=0.1
schedule=constant schedule.warmup_steps=9 optimizer.lr=1e-3 optimizer.clip_norm=0.5 optimizer.weight_decay=10
run.dir=unused run.name=parity
""".split()
# 37 tokens are padded to 64 rows, the last ranks' all padding, or kept, and cut unevenly.
VOCABULARIES = {"padded": 64, "uneven": 1}


@dataclass(frozen=True)
class Cell:
    """One layout and the run it is tried on."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    zero: int = 0
    schedule: str = "none"  # none: no pipeline
    sequence: bool = False
    tied: bool = True
    vocabulary: str = "padded"
    accumulation: int = 1
    checkpointing: str = "none"
    precision: str = "fp32"
    replicate: int = 1
    context: int = 1
    offload: str = "none"
    shared: tuple[str, ...] = ()  # overrides that the reference has too
    more: tuple[str, ...] = ()  # overrides that change no number

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def id(self) -> str:
        words = [f"tp{self.tensor}{'-sp' if self.sequence else ''}-pp{self.pipeline}"]
        words += [self.schedule] * (self.pipeline > 1)
        words += [f"dp{self.data}" + (f"x{self.replicate}" if self.replicate > 1 else ""), f"zero{self.zero}"]
        words.insert(1, f"cp{self.context}") if self.context > 1 else None
        words += [f"acc{self.accumulation}", "tied" if self.tied else "untied", self.vocabulary]
        words += [f"ac_{self.checkpointing}"] * (self.checkpointing != "none")
        words += [self.precision] * (self.precision != "fp32")
        words += [self.offload] * (self.offload != "none")
        words += [each.split(".")[-1].replace("=", "_") for each in self.shared + self.more]
        return "-".join(words)

    @property
    def layers(self) -> int:
        return 8 if self.pipeline > 2 else 4

    @property
    def cost(self) -> float:
        """About how long it takes, in blocks of a rank run once through."""
        halves = 2 if self.schedule in ("zero_bubble", "zbv") and self.checkpointing != "none" else 1
        each = {"none": 1, "full": 2, "selective": 4}[self.checkpointing] * halves * (1 + self.tensor / 8)
        return 4 + self.layers / self.pipeline * self.accumulation * each

    @property
    def model(self) -> tuple[str, ...]:
        """The overrides that the reference shares."""
        return (
            f"model.num_layers={self.layers}",
            f"model.tied_embeddings={str(self.tied).lower()}",
            f"model.vocab_multiple={VOCABULARIES[self.vocabulary]}",
            *self.shared,
        )

    def overrides(self) -> list[str]:
        """Of train.py."""
        layout = {
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "data": self.data,
            "dp_replicate": self.replicate,
            "context": self.context,
            "zero": self.zero,
            "sequence": str(self.sequence).lower(),
            "activation_checkpointing": self.checkpointing,
        }
        if self.pipeline > 1:
            layout["schedule"] = self.schedule
        if self.offload != "none":
            layout |= {"offload": self.offload, "offload_buffer_mib": 1}
        if self.offload == "nvme":
            layout["offload_path"] = tempfile.gettempdir()
        micro = GLOBAL_BATCH // (self.data * self.accumulation)
        return [
            *BASE,
            *self.model,
            f"precision={self.precision}",
            f"data.micro_batch_size={micro}",
            *(f"parallelism.{key}={value}" for key, value in layout.items()),
            *self.more,
        ]


AXES: dict[str, tuple[Any, ...]] = {
    "tensor": (1, 2, 4, 8),
    "pipeline": (1, 2, 4),
    "zero": (0, 1, 2, 3),
    "schedule": ("none", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"),
    "sequence": (False, True),
    "tied": (True, False),
    "vocabulary": ("padded", "uneven"),
    "accumulation": (1, 3, 4),  # 1F1B needs one for each of four ranks
    "checkpointing": ("none", "full", "selective"),
}


def reference_of(cell: Cell, precision: str) -> list[str]:
    """The overrides of the one-process run that a cell is judged by."""
    return [*BASE, *cell.model, f"precision={precision}", f"data.micro_batch_size={GLOBAL_BATCH}"]


# Of sequences cut over ranks every combination with these, too.
CONTEXT_AXES = AXES | {"context": (2, 4, 8)}


def legal(cell: Cell) -> bool:
    """Whether a combination of axis values is a layout of eight ranks, and says each thing once.

    `gptlite.config.load` has the last word on the cells chosen; this only sifts thousands of combinations fast.
    """
    if cell.world != 8 or (cell.pipeline == 1) != (cell.schedule == "none") or (cell.sequence and cell.tensor == 1):
        return False
    if cell.tensor * cell.accumulation > MOST_MESSAGES:
        return False
    if (cell.zero and cell.data * cell.context == 1) or GLOBAL_BATCH % (cell.data * cell.accumulation):
        return False
    if cell.pipeline == 1:
        return True
    config = ParallelismConfig(pipeline=cell.pipeline, schedule=cell.schedule)
    return not schedule_refuses(config, cell.accumulation)


@lru_cache
def legal_cells(context: bool = False) -> list[Cell]:
    """Every legal combination of the axes on eight ranks; with or without cut sequences."""
    cells, axes = [], CONTEXT_AXES if context else AXES
    for values in product(*axes.values()):
        named = dict(zip(axes, values, strict=True))
        degrees = named["tensor"] * named["pipeline"] * named.get("context", 1)
        if degrees <= 8 and legal(cell := Cell(data=8 // degrees, **named)):
            cells.append(cell)
    return cells


def pairs(cell: Cell) -> set[tuple[str, Any, str, Any]]:
    """What a cell tries together: every two axis values of it."""
    axes = CONTEXT_AXES if cell.context > 1 else AXES
    return {(a, getattr(cell, a), b, getattr(cell, b)) for a, b in combinations(axes, 2)}


@lru_cache
def chosen(count: int, seed: int = 3, context: bool = False) -> list[Cell]:
    """`count` legal cells in which every two axis values that can meet do so, early ones covering most.

    Greedy, the same on every machine: the cell with the most new pairs for its cost, ties by a seeded shuffle. Once all
    pairs have been met, they are to be met again.
    """
    candidates = list(legal_cells(context))
    random.Random(seed).shuffle(candidates)
    with_pairs = [(cell, pairs(cell)) for cell in candidates]
    everything = set().union(*(met for _, met in with_pairs))
    picked: list[Cell] = []
    missing = set(everything)
    while len(picked) < count:
        best, met = max(with_pairs, key=lambda each: len(each[1] & missing) / each[0].cost ** 0.5)
        picked.append(best)
        with_pairs.remove((best, met))
        missing = missing - met or set(everything)
    return picked


SIX_HEADS = ("model.num_heads=6", "model.d_model=48", "model.sequence_length=24")
# What the axes above leave out.
MORE: list[Cell] = [
    # Three data ranks, and a pipeline of three and of six: nothing divides evenly.
    Cell(tensor=2, data=3),
    Cell(tensor=2, data=3, zero=1, accumulation=4, sequence=True, vocabulary="uneven"),
    Cell(tensor=2, data=3, zero=2, accumulation=2, tied=False, vocabulary="uneven"),
    Cell(tensor=2, data=3, zero=3, accumulation=4, sequence=True, checkpointing="selective"),
    Cell(pipeline=2, data=3, zero=2, schedule="1f1b", accumulation=4, vocabulary="uneven"),
    Cell(pipeline=2, data=3, zero=3, schedule="zbv", accumulation=4),
    Cell(tensor=2, pipeline=3, schedule="1f1b", accumulation=3, tied=False),
    Cell(pipeline=3, data=2, zero=3, schedule="interleaved_1f1b", accumulation=3, checkpointing="full"),
    Cell(pipeline=6, schedule="1f1b", accumulation=8),
    # Micro-batches that fill a V, and two rounds of interleaving.
    Cell(pipeline=4, data=2, zero=3, schedule="zbv", accumulation=8),
    Cell(pipeline=4, data=2, zero=2, schedule="interleaved_1f1b", accumulation=8, tied=False),
    # Micro-batches beyond MOST_MESSAGES.
    Cell(tensor=8, accumulation=3),
    Cell(tensor=8, accumulation=3, sequence=True, tied=False, vocabulary="uneven", checkpointing="selective"),
    # Shards in copies (HSDP).
    Cell(data=4, replicate=2, zero=1, accumulation=3),
    Cell(data=4, replicate=2, zero=3, accumulation=3, tensor=2, sequence=True, vocabulary="uneven"),
    Cell(data=4, replicate=2, zero=2, accumulation=4, pipeline=2, schedule="1f1b"),
    Cell(data=4, replicate=2, zero=3, accumulation=4, pipeline=2, schedule="zero_bubble", tied=False),
    Cell(data=8, replicate=4, zero=3, vocabulary="uneven"),
    # bf16, judged by the one-process bf16 run.
    Cell(data=8, zero=1, precision="bf16"),
    Cell(data=8, zero=3, accumulation=3, tied=False, precision="bf16"),
    Cell(tensor=8, precision="bf16", vocabulary="uneven"),
    Cell(tensor=4, data=2, zero=2, accumulation=3, sequence=True, precision="bf16"),
    Cell(tensor=2, pipeline=2, data=2, zero=3, schedule="1f1b", accumulation=4, sequence=True, precision="bf16"),
    Cell(pipeline=4, data=2, zero=2, schedule="zbv", accumulation=8, precision="bf16"),
    Cell(tensor=2, pipeline=4, schedule="interleaved_1f1b", accumulation=4, tied=False, precision="bf16"),
    # ZeRO where there is nothing to shard over.
    Cell(tensor=2, pipeline=2, zero=3, schedule="1f1b", accumulation=3),
    # The other keys of a layout.
    Cell(data=4, zero=3, accumulation=3, more=("parallelism.bucket_layers=3", "parallelism.prefetch=2")),
    Cell(
        pipeline=2,
        data=2,
        zero=1,
        schedule="interleaved_1f1b",
        accumulation=4,
        shared=("model.num_layers=8",),
        more=("parallelism.virtual_stages=4",),
    ),
    Cell(pipeline=4, schedule="zero_bubble", accumulation=8, more=("parallelism.virtual_stages=1",)),
    # Other models: no biases; sequences shorter than the positions; fewer rows of vocabulary than ranks need.
    Cell(tensor=2, pipeline=2, schedule="zbv", accumulation=3, sequence=True, shared=("model.bias=false",)),
    Cell(tensor=4, sequence=True, shared=("data.sequence_length=8",)),
    Cell(tensor=8, vocabulary="uneven", shared=("data.vocab_size=9",)),
    Cell(tensor=2, data=2, zero=3, accumulation=3, shared=("model.dropout=0.0", "optimizer=sgd")),
]
# Where fp16 computes, judged by the one-process run in the same precision.
FP16 = [
    Cell(data=8, zero=1, precision="fp16"),
    Cell(data=8, zero=3, accumulation=3, tied=False, precision="fp16"),
    Cell(tensor=8, precision="fp16", vocabulary="uneven"),
    Cell(tensor=2, pipeline=2, data=2, zero=2, schedule="1f1b", accumulation=4, sequence=True, precision="fp16"),
    Cell(pipeline=4, data=2, zero=2, schedule="zbv", accumulation=8, precision="fp16"),
    Cell(tensor=2, pipeline=4, schedule="interleaved_1f1b", accumulation=4, tied=False, precision="fp16"),
    Cell(data=4, replicate=2, zero=3, tensor=2, accumulation=3, checkpointing="selective", precision="fp16"),
    Cell(data=8, zero=0, accumulation=3, precision="amp_o1"),
    Cell(data=8, zero=3, checkpointing="full", vocabulary="uneven", precision="amp_o1"),
    Cell(tensor=4, data=2, zero=2, accumulation=3, sequence=True, tied=False, precision="amp_o1"),
    Cell(tensor=2, pipeline=2, data=2, zero=1, schedule="zero_bubble", accumulation=4, precision="amp_o1"),
    Cell(tensor=2, pipeline=2, data=2, zero=3, schedule="1f1b", accumulation=4, sequence=True, precision="amp_o1"),
    Cell(pipeline=4, data=2, zero=2, schedule="zbv", accumulation=8, precision="amp_o1"),
    Cell(data=8, zero=1, accumulation=3, precision="amp_o2"),
    Cell(data=8, zero=3, tied=False, vocabulary="uneven", precision="amp_o2"),
    Cell(tensor=8, sequence=True, checkpointing="selective", precision="amp_o2"),
    Cell(tensor=2, pipeline=2, data=2, zero=2, schedule="zbv", accumulation=4, sequence=True, precision="amp_o2"),
    Cell(tensor=2, pipeline=2, data=2, zero=3, schedule="1f1b", accumulation=4, precision="amp_o2"),
    Cell(tensor=2, pipeline=4, schedule="gpipe", accumulation=3, checkpointing="full", precision="amp_o2"),
]
# Compiling takes a minute each.
COMPILED = [
    Cell(tensor=2, sequence=True, more=("trainer.compile=true",)),
    Cell(data=2, zero=3, accumulation=3, checkpointing="full", more=("trainer.compile=true",)),
    Cell(pipeline=2, schedule="1f1b", accumulation=3, more=("trainer.compile=true",)),
]
# Offload with every stage of ZeRO, over tensor and pipeline degrees: each is, besides, to the bit what it is without.
OFFLOADED = [
    Cell(
        tensor=tensor,
        pipeline=pipeline,
        data=8 // (tensor * pipeline),
        zero=zero,
        schedule=schedule,
        sequence=tensor > 1 and zero % 2 == 1,
        tied=(zero + pipeline) % 2 == 1,
        vocabulary="uneven" if zero > 1 else "padded",
        accumulation=4,
        offload=offload,
    )
    for tensor, pipeline, schedule in ((2, 2, "1f1b"), (1, 1, "none"), (2, 1, "none"), (1, 2, "zbv"), (1, 4, "1f1b"))
    for zero in (3, 0, 2, 1)
    for offload in ("cpu", "nvme")
] + [
    Cell(data=4, replicate=2, zero=3, tensor=2, accumulation=3, offload="nvme"),
    Cell(data=8, zero=3, accumulation=3, precision="bf16", offload="cpu"),
    Cell(data=8, zero=1, accumulation=3, precision="bf16", offload="nvme"),
    Cell(tensor=4, pipeline=2, schedule="1f1b", zero=3, accumulation=3, offload="nvme"),
]
CHOSEN = chosen(104)
# Sequences cut over ranks: dropout, positions, loss and gradients with all else.
CONTEXT = chosen(40, context=True)
MORE_CONTEXT = [
    Cell(context=2),
    Cell(context=2, data=2, zero=1, accumulation=3, tied=False),
    Cell(context=4, tensor=1, zero=3, accumulation=3, vocabulary="uneven"),
    Cell(context=2, data=3, zero=3, accumulation=4),
    # Shards in copies (HSDP), each cut over the ranks of a sequence too.
    Cell(context=2, data=4, replicate=2, zero=1, accumulation=3),
    Cell(context=2, data=4, replicate=4, zero=3, accumulation=3, checkpointing="full"),
    Cell(context=2, data=2, replicate=2, pipeline=2, zero=2, schedule="zero_bubble", accumulation=4),
    # A slice between tensor-parallel layers that has some of both chunks.
    Cell(context=2, tensor=3, sequence=True, accumulation=3, shared=SIX_HEADS),
    Cell(context=2, tensor=3, sequence=True, shared=(*SIX_HEADS, "ops=reference"), checkpointing="selective"),
    # Other ways to compute attention, with dropout and without.
    Cell(context=4, accumulation=3, shared=("ops=reference",)),
    Cell(context=4, data=2, zero=2, accumulation=3, shared=("ops=reference", "model.dropout=0.0")),
    *(
        Cell(context=2, tensor=2, accumulation=3, shared=("model.dropout=0.0",), more=(f"ops.attention={attention}",))
        for attention in ("sdpa", "matmul", "fused", "fused_softmax")
    ),
    Cell(context=4, pipeline=2, schedule="zbv", zero=3, accumulation=4, shared=("model.dropout=0.0",)),
    Cell(context=4, zero=1, shared=("data.sequence_length=8", "model.bias=false")),
    # bf16, judged by the one-process bf16 run.
    Cell(context=2, precision="bf16"),
    Cell(context=4, data=2, zero=3, accumulation=3, precision="bf16"),
    Cell(context=2, tensor=2, pipeline=2, zero=2, schedule="1f1b", accumulation=4, sequence=True, precision="bf16"),
]
COMPILED += [
    Cell(context=2, more=("trainer.compile=true",)),
    Cell(context=2, tensor=2, zero=3, sequence=True, checkpointing="full", more=("trainer.compile=true",)),
]
CELLS = [*CHOSEN, *MORE, *FP16, *COMPILED, *CONTEXT, *MORE_CONTEXT]
# Every axis value, and beyond them HSDP, bf16, fp16 and Apex's levels; all of eight ranks, which are slow to start.
QUICK = {
    cell.id
    for cell in [
        *CHOSEN[:12],
        next(cell for cell in MORE if cell.replicate > 2),
        next(cell for cell in MORE if cell.precision == "bf16" and cell.pipeline > 1),
        next(cell for cell in FP16 if cell.precision == "fp16" and cell.pipeline > 1),
        next(cell for cell in FP16 if cell.precision == "amp_o1" and cell.pipeline > 1),
        next(cell for cell in FP16 if cell.precision == "amp_o2" and cell.pipeline > 1),
        *CONTEXT[:5],
    ]
}
# With these, the pairs of all axis values, and some of what is no axis. The rest meets each pair again and again.
SLOW = {cell.id for cell in [*CHOSEN[:33], *MORE[::6], *FP16[::4], *CONTEXT[:12], *MORE_CONTEXT[::3]]} - QUICK


@dataclass(frozen=True)
class Refused:
    """Overrides of train.py that no number of ranks can run, or not `world`, and what the refusal must name."""

    overrides: str
    names: str
    world: int | None = None

    def reason(self) -> str:
        """The line that train.py prints. Fails if it would run."""
        try:
            config = load([*BASE, "precision=fp32", *self.overrides.split()])
            if self.world is not None:
                check_world(config, self.world)
        except ConfigError as error:
            return str(error)
        raise AssertionError(f"{self.overrides} is not refused")


P = "parallelism."
REFUSED = [
    Refused(f"{P}tensor=3", "model.num_heads=8"),
    Refused(f"{P}tensor=4 model.d_ff=102", "model.d_ff=102"),
    Refused(f"{P}tensor=8 data.vocab_size=5 model.vocab_size=5 model.vocab_multiple=1", "5 rows"),
    Refused(f"{P}sequence=true", "parallelism.sequence=true"),
    Refused(f"{P}tensor=8 {P}sequence=true data.sequence_length=12", "data.sequence_length=12"),
    Refused(f"{P}pipeline=9 {P}schedule=gpipe", "model.num_layers=8"),
    Refused(f"{P}pipeline=8 {P}schedule=zbv", "16 stages"),
    Refused(f"{P}pipeline=4 {P}schedule=1f1b data.micro_batch_size=16", "needs at least 4 micro-batches"),
    Refused(f"{P}pipeline=3 {P}schedule=interleaved_1f1b data.micro_batch_size=3 {P}data=1", "in equal rounds of 3"),
    Refused(f"{P}pipeline=3 {P}schedule=zero_bubble data.micro_batch_size=3 {P}data=1", "in equal rounds of 3"),
    Refused(f"{P}pipeline=2 {P}schedule=gpipe {P}virtual_stages=2", "parallelism.virtual_stages=2"),
    Refused(f"{P}pipeline=2 {P}schedule=zbv {P}virtual_stages=1", "parallelism.virtual_stages=1"),
    Refused(f"{P}pipeline=2 {P}schedule=zbv trainer.compile=true", "trainer.compile=true"),
    Refused(f"{P}pipeline=2 {P}schedule=dualpipe", "parallelism.schedule=dualpipe"),
    Refused(f"{P}zero=4", "parallelism.zero=4"),
    Refused(f"{P}data=4 {P}zero=3 {P}dp_replicate=3", "parallelism.dp_replicate=3"),
    Refused(f"{P}data=4 {P}dp_replicate=2", "parallelism.zero=0"),
    Refused(f"{P}data=5", "data.global_batch_size=48"),
    Refused(f"{P}data=2 {P}tensor=2 data.micro_batch_size=8", "world size 8", world=8),
    Refused(f"{P}tensor=2 {P}pipeline=2", "world size 6", world=6),
    Refused(f"{P}context=3", "data.sequence_length=16"),
    Refused(f"{P}context=4 {P}tensor=8 {P}sequence=true", "data.sequence_length=16 / parallelism.context=4 = 4"),
]
