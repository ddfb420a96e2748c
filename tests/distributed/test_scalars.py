"""Parameters without dims: every layout trains them as one process does, and checkpoints carry them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from marking import marked
from run_files import differing

from distributed.cells.compare import run_cell
from distributed.cells.reshard import COUNTERS
from distributed.cells.reshard_pairs import SINGLE, Layout
from distributed.cells.run import GrowingRanks, Ranks
from distributed.cells.steps import joined
from gptlite.config import Config, load
from gptlite.satellites.parity.record import recorded

BASE = """
plugins=[models.scaled] run.name=scaled data.global_batch_size=24 trainer.max_steps=10 schedule=constant
schedule.warmup_steps=1 optimizer.lr=1e-3 optimizer.clip_norm=0.5 precision=fp32 checkpoint.keep=0
""".split()
MODELS = {
    "scaled": ["model=scaled", "model.width=96", "data=random_points"],
    "gained": """
        model=gained model.num_layers=4 model.num_heads=4 model.d_model=16 model.sequence_length=16
        model.vocab_multiple=1 data=synthetic data.vocab_size=37 data.num_tokens=2000 data.sequence_length=16
    """.split(),
}
CASES = [
    ("scaled", Layout(pipeline=2, data=2, zero=3)),
    ("gained", Layout(tensor=2, data=2, zero=1), "parallelism.sequence=true"),
    ("scaled", Layout(data=2)),
    ("scaled", Layout(data=2, zero=1), "optimizer=adafactor"),
    ("scaled", Layout(data=3, zero=2), "optimizer=muon"),
    ("scaled", Layout(data=3, zero=3), "precision=bf16_stochastic"),
    ("scaled", Layout(data=4, zero=3, replicate=2), "optimizer=lamb"),
    ("scaled", Layout(pipeline=2, data=2, zero=0, schedule="zbv"), "optimizer=lion"),
    ("scaled", Layout(pipeline=2), "optimizer=sgd"),
    ("scaled", Layout(data=2, zero=3), "parallelism.offload=cpu", "parallelism.activation_checkpointing=full"),
    ("gained", Layout(tensor=2), "parallelism.sequence=true"),
    ("gained", Layout(tensor=2, pipeline=2), "model.tied_embeddings=true"),
    ("gained", Layout(tensor=2, data=2, zero=3), "optimizer=muon"),
    ("gained", Layout(context=2, data=2, zero=2)),
]


def config_of(model: str, layout: Layout, *overrides: str) -> Config:
    micro = "data.micro_batch_size=2"
    return load([*BASE, micro, *MODELS[model], *layout.overrides(), "run.dir=unused", *overrides])


def off(config: Config, world: int, name: str, reference: str) -> list[str] | None:
    """On the first `world` ranks: on rank 0, what differs from one process in the first steps."""
    with joined(world, name) as is_in:
        found = run_cell(config, reference, None, steps=2) if is_in else None
    return None if found is None else [str(each) for step in found.comparisons for each in step.differences]


def reference(config: Config, file: Path) -> str:
    """The first steps of one process, in a file."""
    file.write_bytes(pickle.dumps([*recorded(config, 2)]))
    return str(file)


@pytest.mark.parametrize(
    "case",
    marked(
        [(each,) for each in CASES], quick=2, slow=len(CASES), name=lambda each: "-".join([each[0][0], each[0][1].id])
    ),
)
def test_scalars_train_as_in_one_process(case: tuple, growing: GrowingRanks, tmp_path: Path):
    """Gradients, the norm that clips them, and the values that any optimizer gives them."""
    model, layout, *more = case
    shared = [each for each in more if not each.startswith("parallelism.")]
    file = reference(config_of(model, SINGLE, *shared), tmp_path / "alone")
    config = config_of(model, layout, *more)
    assert growing.run(layout.world, "distributed.test_scalars:off", config, file)[0] == []


def test_scalars_weigh_in_the_norm_and_move():
    """Else any layouts would agree."""
    first, second = recorded(config_of("scaled", SINGLE), 2)
    scalars = [name for name, whole in first.gradients.items() if not whole.value.shape]
    assert len(scalars) == 6
    square = sum(whole.value.double().square().sum() for whole in first.gradients.values())
    assert first.grad_norm == pytest.approx(float(square.sqrt()), rel=1e-6)
    for name in scalars:
        assert abs(first.gradients[name].value) > 1e-3 * first.grad_norm
        assert second.values[name].value != first.values[name].value


RESHARDED = [
    ("scaled", Layout(data=3, zero=3), Layout(pipeline=2, data=2, zero=1)),
    ("scaled", SINGLE, Layout(data=2)),
    ("scaled", Layout(pipeline=2, data=2, zero=3), SINGLE),
    ("gained", Layout(tensor=2, data=2, zero=2), Layout(pipeline=2, data=2, zero=3)),
]


@pytest.mark.parametrize(("model", "source", "target"), marked(RESHARDED, quick=1, slow=3))
def test_scalars_are_resharded(model: str, source: Layout, target: Layout, growing: GrowingRanks, tmp_path: Path):
    config, cases = config_of(model, source, f"run.dir={tmp_path / 'a'}"), "distributed.cells.reshard:"
    folder = growing.run(source.world, cases + "save", config)[0]
    config = config_of(model, target, f"run.dir={tmp_path / 'b'}", f"checkpoint.resume={folder}")
    resumed = growing.run(target.world, cases + "resume", config)
    assert resumed[0].wrong == []
    assert all(each.counters == COUNTERS for each in resumed)


@pytest.mark.slow
def test_a_run_with_scalars_resumes_to_the_bit(four: Ranks, tmp_path: Path):
    run = [*BASE, *MODELS["scaled"], *Layout(pipeline=2, data=2, zero=3).overrides(), "data.micro_batch_size=2"]
    for folder, steps in (("whole", 4), ("cut", 2), ("cut", 4)):
        overrides = [*run, f"run.dir={tmp_path / folder}", f"trainer.max_steps={steps}", "checkpoint.interval=2"]
        assert four.run("distributed.cells.steps:train", overrides, timeout=120) == [0] * 4
    assert differing(tmp_path / "whole", tmp_path / "cut", 4) == []
