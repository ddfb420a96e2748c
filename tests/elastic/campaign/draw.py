"""Seeded losses: what is lost, on which node, and when. A plan depends on nothing but the seed and its number."""

import random
from dataclasses import dataclass

KINDS = ("rank", "agent", "cable", "frozen", "two", "save", "memory_save", "restore", "rejoin")
# How a node is lost; the other kinds are one of these at a certain moment.
WAYS = ("rank", "agent", "cable", "frozen")

MODEL = """
model=gpt-lite model.num_layers=2 model.num_heads=2 model.d_model=32 model.sequence_length=16
data=synthetic data.vocab_size=128 data.num_tokens=200000 data.sequence_length=16
""".split()
EXPERTS = """
model=moe-lite model.num_layers=2 model.num_heads=2 model.d_model=32 model.sequence_length=16
data=synthetic data.vocab_size=128 data.num_tokens=200000 data.sequence_length=16
""".split()
# 24 samples are 1 to 4, 6 and 8 equal parts; 5 data ranks have uneven ones.
COMMON = """
data.global_batch_size=24 data.micro_batch_size=2 seed=1
schedule=constant schedule.warmup_steps=100 optimizer.lr=3e-4
trainer.log_interval=1 trainer.eval_interval=0 trainer.eval_samples=4 trainer.sample_tokens=0
checkpoint.interval=50 checkpoint.keep=0 run.name=campaign
""".split()
FP32 = 1e-6  # relative difference of a step's loss from that of one process
FP16 = 2e-3


@dataclass(frozen=True)
class Layout:
    """A layout of a campaign. `ranks` per node, between `least` and `most` nodes."""

    name: str
    overrides: tuple[str, ...] = ()
    ranks: int = 1
    least: int = 2
    most: int = 6
    model: tuple[str, ...] = tuple(MODEL)
    precision: str = "fp32"
    timeout: int = 10  # parallelism.timeout_seconds, by which a silent peer is noticed
    multiple: int = 1  # of which the number of ranks that train is one
    reference: str = "fp32"  # name of the uninterrupted run, which layouts share
    memory_interval: int = 5

    @property
    def tolerance(self) -> float:
        return FP16 if self.precision == "fp16" else FP32

    def command(self, folder: str, steps: int) -> list[str]:
        """Return the overrides of a run on nodes."""
        keys = f"parallelism.timeout_seconds={self.timeout}", f"checkpoint.memory_interval={self.memory_interval}"
        return [*self.alone(folder, steps), *self.overrides, "parallelism.data=elastic", "checkpoint.replicas=1", *keys]

    def alone(self, folder: str, steps: int) -> list[str]:
        """Return the overrides of the uninterrupted run in one process, with the same optimizer and model."""
        return [*self.model, *COMMON, f"precision={self.precision}", f"trainer.max_steps={steps}", f"run.dir={folder}"]


LAYOUTS = (
    Layout("data"),
    Layout("zero1", ("parallelism.zero=1",)),
    Layout("zero2", ("parallelism.zero=2",)),
    Layout("zero3", ("parallelism.zero=3",)),
    Layout("experts", ("parallelism.expert=2",), ranks=2, most=3, model=tuple(EXPERTS), reference="experts"),
    Layout("fp16", precision="fp16", most=4, reference="fp16"),
    # 16 ranks on 4 nodes: data 4, 3 or 2 after a loss, and back.
    Layout("tensor2-pipeline2", ("parallelism.tensor=2", "parallelism.pipeline=2"), 4, 2, 4, timeout=30),
    # A node is one half of a tensor group: with an odd number of nodes, one rank is a spare.
    Layout("tensor2", ("parallelism.tensor=2",), 1, 3, 4, multiple=2),
)


@dataclass(frozen=True)
class Loss:
    """A loss. `steps` are trained since the last one is over, then `delay` seconds pass. `ways` of losing `nodes`."""

    kind: str
    ways: tuple[str, ...]
    nodes: tuple[int, ...]
    steps: int
    delay: float
    choice: float  # which process of the node, as a fraction
    second: float  # seconds until the second loss, of kinds restore and rejoin


@dataclass(frozen=True)
class Plan:
    """One run: its layout, its nodes and its losses, in order."""

    seed: int
    number: int
    layout: Layout
    nodes: int
    losses: tuple[Loss, ...]
    steps: int = 600

    @property
    def whole(self) -> str:
        """The name of the uninterrupted run's folder."""
        return f"alone-{self.layout.reference}-{self.steps}"


def draw(seed: int, number: int, losses: int = 6, layout: str = "", kinds: tuple[str, ...] = KINDS) -> Plan:
    """Draw the run of a number. `layout` names one of LAYOUTS instead of a drawn one."""
    chance = random.Random(f"{seed} {number}")
    drawn = chance.choice(LAYOUTS)
    drawn = next(each for each in LAYOUTS if each.name == layout) if layout else drawn
    nodes = chance.randint(drawn.least, drawn.most)
    return Plan(seed, number, drawn, nodes, tuple(_loss(chance, drawn, nodes, kinds) for _ in range(losses)))


def _loss(chance: random.Random, layout: Layout, nodes: int, kinds: tuple[str, ...]) -> Loss:
    kind = chance.choice(kinds)
    spare = nodes - layout.multiple  # nodes that the run can do without
    one, other = chance.sample(range(nodes), 2)
    away = [way for way in WAYS if way != "rank"]
    if kind in WAYS:
        ways, victims = (kind,), (one,)
    elif kind == "two":
        ways = chance.choice(WAYS), chance.choice(WAYS if spare > 1 else ("rank",))
        victims = one, other
    elif kind == "restore":  # the second one falls into the restart after the first
        ways = chance.choice(WAYS), "rank"
        victims = one, other
    elif kind == "rejoin":  # the second one falls into the return of the first
        ways = chance.choice(away), "rank"
        victims = one, chance.choice((one, other))
    else:
        ways, victims = (chance.choice(WAYS),), (one,)
    steps, delay = chance.randint(3, 20), chance.uniform(0, 0.05)
    return Loss(kind, ways, victims, steps, delay, chance.random(), chance.uniform(0.1, 4))
