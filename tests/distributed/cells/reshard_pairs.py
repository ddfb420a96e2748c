"""Layouts of one to eight ranks, and the ordered pairs of them that a checkpoint is carried between."""

from __future__ import annotations

from dataclasses import dataclass

from gptlite.parallelism.config import ParallelismConfig
from gptlite.parallelism.layout import num_stages

# A width, positions and a vocabulary that three, five, six, seven or eight data ranks do not divide: the last of them
# get less than the others, or nothing.
BASE = """
data=synthetic data.vocab_size=37 model.vocab_size=37 data.num_tokens=1000 data.micro_batch_size=1 trainer.max_steps=10
model=gpt-lite model.num_heads=4 model.d_model=20 model.sequence_length=12 data.sequence_length=12
schedule=constant schedule.warmup_steps=1 precision=fp32 run.name=reshard checkpoint.keep=0
""".split()
MICRO_BATCHES = 8  # what every schedule runs on up to four pipeline ranks, and more than six need
MODELS = {
    "tied": ["model.tied_embeddings=true", "model.vocab_multiple=1"],
    "tied-padded": ["model.tied_embeddings=true", "model.vocab_multiple=64"],
    "untied": ["model.tied_embeddings=false", "model.vocab_multiple=1"],
    "experts": ["model.vocab_multiple=1", "model.moe.experts=8", "model.moe.d_ff=8", "model.moe.shared=1"],
    "values": ["model.value_residual=true", "model.kv_heads=2"],
}


@dataclass(frozen=True)
class Layout:
    """One way to cut the model; `replicate`: copies of the shards (HSDP)."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    replicate: int = 1
    virtual: int | None = None  # stages of a pipeline rank
    context: int = 1
    expert: int = 1

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def stages(self) -> int:
        config = ParallelismConfig(pipeline=self.pipeline, schedule=self.schedule, virtual_stages=self.virtual)
        return num_stages(config)

    @property
    def id(self) -> str:
        words = ([f"tp{self.tensor}"] if self.tensor > 1 else []) + (
            [f"pp{self.pipeline}_{self.schedule}"] if self.pipeline > 1 else []
        )
        words += [f"virtual{self.virtual}"] if self.virtual is not None else []
        words += ([f"cp{self.context}"] if self.context > 1 else []) + ([f"ep{self.expert}"] if self.expert > 1 else [])
        words += [f"dp{self.data}" + (f"x{self.replicate}" if self.replicate > 1 else "")] if self.data > 1 else []
        words += [f"zero{self.zero}"] if self.data * self.context > 1 or self.zero > 0 else []
        return "_".join(words) or "single"

    def overrides(self) -> list[str]:
        """Of train.py."""
        keys = {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data, "zero": self.zero}
        keys |= {"dp_replicate": self.replicate, "context": self.context, "expert": self.expert}
        if self.pipeline > 1:
            keys |= {"schedule": self.schedule, "virtual_stages": "null" if self.virtual is None else self.virtual}
        return [f"parallelism.{key}={value}" for key, value in keys.items()]


@dataclass(frozen=True)
class Pair:
    """A checkpoint of `model` saved by `source` and loaded by `target`."""

    source: Layout
    target: Layout
    model: str = "tied"
    layers: int | None = None  # by default enough for the stages of both

    @property
    def id(self) -> str:
        return f"{self.source.id}-to-{self.target.id}-{self.model}"

    @property
    def world(self) -> int:
        """Ranks that it takes."""
        return max(self.source.world, self.target.world)

    def overrides(self, layout: Layout) -> list[str]:
        """Of train.py, without the run's folder."""
        # Odd, so that an even number of stages are not equally long.
        layers = self.layers or (5 if max(self.source.stages, self.target.stages) < 5 else 9)
        batch = f"data.global_batch_size={MICRO_BATCHES * layout.data}"
        # Of 12 positions four ranks cannot have equal chunks.
        length = ["data.sequence_length=8"] if max(self.source.context, self.target.context) > 1 else []
        return [*BASE, *MODELS[self.model], f"model.num_layers={layers}", *layout.overrides(), batch, *length]


SINGLE = Layout()
# Tensor x pipeline x ZeRO on up to eight ranks; the data degrees are odd where there is room. (Four pipeline ranks and
# two tensor ranks leave one data rank, which has nothing to shard.)
GRID = [
    SINGLE,
    Layout(data=3, zero=1),
    Layout(data=5, zero=2),
    Layout(data=7, zero=3),
    Layout(pipeline=2, data=3, zero=0, schedule="1f1b"),
    Layout(pipeline=2, data=2, zero=1, schedule="zbv"),
    Layout(pipeline=2, data=4, zero=2, schedule="interleaved_1f1b"),
    Layout(pipeline=2, data=3, zero=3, schedule="zbv"),
    Layout(pipeline=4, data=2, zero=0, schedule="zbv"),
    Layout(pipeline=4, data=2, zero=1, schedule="interleaved_1f1b"),
    Layout(pipeline=4, data=2, zero=2, schedule="1f1b"),
    Layout(pipeline=4, data=2, zero=3, schedule="zero_bubble"),
    Layout(tensor=2, data=3, zero=0),
    Layout(tensor=2, data=2, zero=1),
    Layout(tensor=2, data=4, zero=2),
    Layout(tensor=2, data=3, zero=3),
    Layout(tensor=2, pipeline=2, data=2, zero=0, schedule="interleaved_1f1b"),
    Layout(tensor=2, pipeline=2, data=2, zero=1, schedule="1f1b"),
    Layout(tensor=2, pipeline=2, data=2, zero=2, schedule="zbv"),
    Layout(tensor=2, pipeline=2, data=2, zero=3, schedule="interleaved_1f1b"),
    Layout(tensor=2, pipeline=4, zero=0, schedule="1f1b"),
    Layout(tensor=2, pipeline=4, zero=1, schedule="zbv"),
    Layout(tensor=2, pipeline=4, zero=2, schedule="interleaved_1f1b"),
    Layout(tensor=2, pipeline=4, zero=3, schedule="gpipe"),
    Layout(tensor=4, data=2, zero=0),
    Layout(tensor=4, data=2, zero=1),
    Layout(tensor=4, data=2, zero=2),
    Layout(tensor=4, data=2, zero=3),
    Layout(tensor=4, pipeline=2, zero=0, schedule="zbv"),
    Layout(tensor=4, pipeline=2, zero=1, schedule="interleaved_1f1b"),
    Layout(tensor=4, pipeline=2, zero=2, schedule="1f1b"),
    Layout(tensor=4, pipeline=2, zero=3, schedule="zbv"),
]
MORE = [
    Layout(data=4, zero=3, replicate=2),
    Layout(data=6, zero=3, replicate=2),
    Layout(data=6, zero=1, replicate=3),
    Layout(tensor=2, data=4, zero=2, replicate=2),
    Layout(pipeline=2, data=4, zero=3, replicate=2, schedule="zbv"),
    Layout(pipeline=3, data=2, zero=1, schedule="1f1b"),
    Layout(pipeline=3, schedule="zbv"),
    Layout(pipeline=6, schedule="gpipe"),
    Layout(pipeline=7, schedule="1f1b"),
    Layout(pipeline=2, data=3, zero=2, schedule="interleaved_1f1b", virtual=4),
    Layout(data=8, zero=3),
    Layout(data=8, zero=0),
    Layout(tensor=2),
]
LAYOUTS = [*GRID, *MORE]
STRIDES = (14, 31)  # of two layouts that far apart in the list, one saves and the other loads

# On up to four ranks; the first of them for every run of the tests.
SMALL = [
    Pair(SINGLE, Layout(tensor=2, pipeline=2, schedule="zbv")),
    Pair(Layout(tensor=2, pipeline=2, schedule="zbv"), Layout(data=3, zero=3)),
    Pair(Layout(data=3, zero=3), Layout(tensor=4), "untied", layers=2),
    Pair(Layout(tensor=4), Layout(pipeline=2, data=2, zero=1, schedule="zbv")),
    Pair(Layout(pipeline=2, data=2, zero=2, schedule="1f1b"), Layout(data=4, zero=3, replicate=2)),
    Pair(Layout(data=4, zero=1, replicate=2), Layout(pipeline=2, data=2, zero=3, schedule="interleaved_1f1b")),
    Pair(Layout(pipeline=4, schedule="1f1b"), Layout(tensor=2, data=2, zero=2), "untied"),
    Pair(Layout(tensor=2, data=2, zero=3), SINGLE, "tied-padded"),
]


def _far_apart() -> list[Pair]:
    """Every layout saves twice and loads twice; three of four models have their embeddings tied."""
    models = ("tied", "tied-padded", "untied", "tied")
    order = [(source, stride) for stride in STRIDES for source in range(len(LAYOUTS))]
    return [
        Pair(LAYOUTS[source], LAYOUTS[(source + stride) % len(LAYOUTS)], models[(source + stride) % len(models)])
        for source, stride in order
    ]


CONTEXT = [
    Pair(Layout(context=2), Layout(tensor=2), layers=2),
    Pair(Layout(context=4, zero=3), SINGLE),
    Pair(SINGLE, Layout(context=4, zero=3), "untied"),
    Pair(Layout(tensor=2), Layout(context=2, zero=1)),
    Pair(Layout(context=2, data=2, zero=3), Layout(context=4, zero=1), "tied-padded"),
    Pair(Layout(context=2, tensor=2, zero=2), Layout(pipeline=2, context=2, schedule="zbv")),
    Pair(Layout(context=4, tensor=2, zero=3), Layout(data=7, zero=3)),
    Pair(Layout(data=5, zero=2), Layout(context=2, pipeline=2, data=2, zero=3, schedule="interleaved_1f1b")),
    Pair(Layout(context=2, data=4, zero=3, replicate=2), Layout(tensor=4, context=2), "untied"),
]

EXPERTS = [
    Pair(Layout(data=2, zero=3, expert=2), Layout(tensor=2, data=2, expert=2), "experts", layers=2),
    Pair(SINGLE, Layout(data=4, zero=3, expert=2), "experts"),
    Pair(Layout(data=4, expert=4), SINGLE, "experts"),
    Pair(Layout(tensor=2, data=4, zero=3, expert=4), Layout(pipeline=2, data=4, zero=1, expert=2), "experts"),
    Pair(Layout(data=8, zero=2, expert=8), Layout(data=3, zero=3), "experts"),
    Pair(Layout(pipeline=2, context=2, data=2, expert=2), Layout(data=8, zero=3, replicate=2, expert=2), "experts"),
]

VALUES = Pair(Layout(tensor=2, pipeline=2, schedule="zbv"), Layout(data=3, zero=3), "values")
ALL = [*SMALL, *_far_apart(), *CONTEXT, *EXPERTS, VALUES]
QUICK = [*SMALL[:2], *EXPERTS[:1]]
SLOW = [
    *SMALL[2:],
    *CONTEXT[:1],
    *_far_apart()[::10],
    _far_apart()[15],
    *CONTEXT[1:4],
    *EXPERTS[1:3],
    VALUES,
]  # the rest are long
