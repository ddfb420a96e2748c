"""Checkpoints in memory: restored bit for bit, on any layout, from the parts that survive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_files import differing, read_metrics

from distributed.cells.run import GrowingRanks
from elastic.cells import Train

Launch = Callable[..., Any]


@pytest.fixture(scope="module")
def growing():
    ranks = GrowingRanks((2, 4))
    yield ranks
    ranks.close()


@pytest.fixture
def launch(growing: GrowingRanks, tiny: list[str], tmp_path: Path) -> Launch:
    def run(folder: str, world: int, *overrides: str, steps: int = 8, **options: Any) -> list[Any]:
        memory = ["checkpoint.memory_interval=2", "checkpoint.interval=0", "data.micro_batch_size=1"]
        all_of = [*tiny, *memory, f"run.dir={tmp_path / folder}", f"trainer.max_steps={steps}", *overrides]
        options.setdefault("shelf", str(tmp_path / folder))
        return growing.run(world, "elastic.cells:train", Train(all_of, **options), timeout=200)

    return run


def log(folder: Path) -> str:
    return (folder / "train.log").read_text()


def test_a_run_goes_on_from_memory_as_if_nothing_had_happened(launch: Launch, tmp_path: Path):
    zero = ("parallelism.zero=2",)
    launch("whole", 2, *zero)
    assert launch("cut", 2, *zero, crash=5) == ["crash"] * 2
    assert not list((tmp_path / "cut" / "checkpoints").glob("step-*"))
    assert [row["step"] for row in read_metrics(tmp_path / "cut") if "loss" in row] == [1, 2, 3, 4, 5]
    launch("cut", 2, *zero)
    assert differing(tmp_path / "whole", tmp_path / "cut", 8) == []
    assert "restored step 4 from memory of nodes n0 and n1" in log(tmp_path / "cut")
    rows = [[(r["step"], r["loss"]) for r in read_metrics(tmp_path / each) if "loss" in r] for each in ("whole", "cut")]
    assert rows[0] == rows[1]
    assert [step for step, _ in rows[1]] == list(range(1, 9))
