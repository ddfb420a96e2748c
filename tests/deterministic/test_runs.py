"""Whole runs: resumed on another layout, evaluated, and ended by a gradient that no sum can hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed.cells.layouts import BASE
from distributed.cells.run import Ranks
from run_files import differing, read_metrics

from gptlite.config import load
from gptlite.satellites.deterministic.reduction import ExactReduction
from gptlite.start.pretrain import pretrain

P = "parallelism."
ON = [*BASE, "precision=fp32", f"{P}deterministic=true", "model.num_layers=2", "data.global_batch_size=12"]
ON += [
    "trainer.log_interval=1",
    "trainer.eval_interval=2",
    "trainer.eval_samples=12",
    "trainer.sample_tokens=0",
    "schedule.warmup_steps=0",
]
TRAIN = "distributed.cells.steps:train"
SAME = "step", "loss", "grad_norm", "lr", "val_loss"


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def results(folder: Path) -> list[list[object]]:
    return [[row.get(key) for key in SAME] for row in read_metrics(folder)]


def test_a_run_resumed_on_another_layout_is_that_of_one_process(two: Ranks, tmp_path: Path):
    once, moved = tmp_path / "once", tmp_path / "moved"
    assert pretrain(load([*ON, f"run.dir={once}", "trainer.max_steps=4"])).exit_code == 0
    words = [*ON, f"run.dir={moved}", "data.micro_batch_size=3"]
    assert two.run(TRAIN, [*words, f"{P}data=2", f"{P}zero=3", "trainer.max_steps=2"]) == [0, 0]
    assert two.run(TRAIN, [*words, f"{P}data=2", f"{P}zero=1", "trainer.max_steps=3"]) == [0, 0]
    assert pretrain(load([*words, f"{P}data=1", "trainer.max_steps=4"])).exit_code == 0
    assert differing(once, moved, 4) == []
    expected = results(once)
    assert [row[0] for row in expected if row[4] is not None] == [2, 4]
    assert [row for row in results(moved) if row in expected] == expected  # step 3, the last one once, is evaluated too


def test_a_gradient_that_no_sum_can_hold_ends_the_run_by_name(two: Ranks):
    with pytest.raises(Exception, match="TooLarge") as caught:
        two.run("deterministic.test_runs:overflowing")
    assert "parallelism.deterministic=true: a sample's share of the gradient of " in str(caught.value)


def overflowing() -> None:
    from distributed.cells.steps import built

    words = [*ON, f"{P}data=2", f"{P}zero=2"]
    with built(load(words)) as (_, state, step):
        replaced = step.mesh.reduction
        assert isinstance(replaced, ExactReduction)
        replaced.limit = 1e-9
        step(state)
