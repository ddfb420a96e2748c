"""A step that is acted on a step later: all ranks act alike, and on the numbers they had without the lag."""

import json
from pathlib import Path

import pytest

from distributed.cell import Cell
from distributed.ranks import Ranks
from gptlite.config import load

FP16 = [
    "precision.initial_scale_power=20", "precision.hysteresis=1", "precision.loss_scale_window=4",
]  # fmt: skip
CELLS = [
    (Cell(data=2, zero=1, accumulation=2), []),
    (Cell(data=2, zero=3, accumulation=2, precision="fp16"), FP16),
    (Cell(tensor=2, accumulation=2, precision="fp16"), FP16),
    (Cell(pipeline=2, schedule="1f1b", accumulation=4), []),
]


@pytest.mark.parametrize(("cell", "more"), CELLS, ids=lambda each: each.id if isinstance(each, Cell) else "")
def test_steps_are_the_same_steps(two: Ranks, cell: Cell, more: list[str]) -> None:
    config = load([*cell.overrides(), *more])
    now, late = (two.run("distributed.steps_cases:taken", config, 10, lag, timeout=200) for lag in (0, 1))
    # Not compared as they are: the norm of a step that overflowed is nan.
    assert [(repr(results), digest) for results, digest in late] == [(repr(each), digest) for each, digest in now]
    results = now[0][0]
    assert [each.step for each in results] == list(range(1, 11))
    assert any(each.skipped for each in results) is bool(more)
    assert not all(each.skipped for each in results)


@pytest.mark.parametrize("lag", [0, 1])
def test_ranks_stop_after_the_same_step(two: Ranks, tmp_path: Path, lag: int) -> None:
    overrides = [
        *(each for each in Cell(data=2, zero=1).overrides() if not each.startswith(("run.", "trainer.max"))),
        *(f"run.dir={tmp_path}", "run.name=x", "trainer.max_steps=50", "trainer.eval_interval=0"),
    ]
    found = two.run("distributed.steps_cases:stopped", overrides, lag, 1, 5, timeout=200)
    assert found == [(143, 5 + lag)] * 2
    assert json.loads((tmp_path / "result.json").read_text())["step"] == 5 + lag
