"""The oracle tells a layout that agrees with one process from one with a bug, a crash from a hang, and in time."""

import time
from collections.abc import Iterator
from functools import partial

import pytest
from certify.fuzz import rank_functions
from distributed.cells.bugs import BUGS
from distributed.cells.layouts import Cell

from gptlite.satellites.certify.fuzz import oracle as oracle_module
from gptlite.satellites.certify.fuzz.axes import AXES, DEFAULT, Draw
from gptlite.satellites.certify.fuzz.oracle import Oracle
from gptlite.satellites.certify.fuzz.ranks import RankError, RankPool
from gptlite.satellites.certify.fuzz.run import compare_layout

TENSOR = DEFAULT | {"tensor": "parallelism.tensor=2"}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def oracle(pool: RankPool) -> Iterator[Oracle]:
    oracle = Oracle(pool)
    yield oracle
    oracle.close()


def judged(oracle: Oracle, draw: Draw, compared=compare_layout):
    oracle.compared = compared
    return oracle.judge(draw)


def test_a_layout_agrees_and_its_errors_are_told(oracle: Oracle):
    judgement = judged(oracle, TENSOR)
    assert judgement.ok, judgement.message
    assert judgement.errors["loss"] < 1e-6
    assert 0 < judgement.errors["gradient"][0] < 1e-5
    assert judgement.errors["gradient"][1].startswith(
        ("layers.", "token_embedding", "position_embedding", "final_norm")
    )


def test_a_planted_bug_is_found(oracle: Oracle):
    bug = "tensor: a row-parallel layer's outputs are not summed"
    judgement = judged(oracle, TENSOR, partial(rank_functions.with_bug, bug))
    assert judgement.kind == "parity"
    assert judgement.message.startswith("different: step 1: gradient of token_embedding.weight is off by ")


def test_what_fails_on_ranks_is_told_apart_and_the_next_draw_runs(oracle: Oracle):
    crash = judged(oracle, TENSOR, rank_functions.crashes)
    assert (crash.kind, crash.message) == ("crash", "ZeroDivisionError: of the last rank")
    late = judged(oracle, TENSOR, rank_functions.refuses)
    assert late.kind == "late"
    assert "parallelism.tensor=2 is refused" in late.message
    ended = judged(oracle, TENSOR, rank_functions.ends)
    assert (ended.kind, ended.message) == ("crash", "its process ended with status 3")
    assert judged(oracle, TENSOR).ok


def test_a_hang_ends_in_time_and_leaves_no_process(oracle: Oracle):
    start = time.monotonic()
    judged(oracle, TENSOR)  # with ranks that are there
    processes = [process for process, _ in oracle.ranks._ranks]
    timeout, oracle.timeout = oracle.timeout, 2.0
    hang = judged(oracle, TENSOR, rank_functions.hangs)
    oracle.timeout = timeout
    assert (hang.kind, hang.message) == ("hang", "ranks [0, 1] of 2 are not done after 2 s")
    assert [process.is_alive() for process in processes] == [False] * len(processes)
    assert time.monotonic() - start < 60


def test_checkpoints_resume_on_one_process_and_those_of_one_process_on_the_layout(oracle: Oracle, monkeypatch):
    oracle.compared = compare_layout
    assert oracle.judge_resumed(TENSOR).ok
    monkeypatch.setattr(oracle_module, "save_first_step", rank_functions.saves_other_weights)
    judgement = oracle.judge_resumed(TENSOR)
    assert judgement.kind == "resume"
    assert judgement.message.startswith("saved on 2, resumed on 1 ranks: different: step 2: ")


def test_what_hung_trains_as_one_process(oracle: Oracle):
    """A rank without rows of the embedding left out the collective of its backward pass."""
    few = {"sequence": "parallelism.sequence=true", "vocabulary": AXES["vocabulary"].values[2]}
    judgement = judged(oracle, TENSOR | {"tensor": "parallelism.tensor=4"} | few)
    assert judgement.ok, judgement.message


def test_a_pool_refuses_more_ranks_than_it_has(pool: RankPool):
    with pytest.raises(ValueError, match="world=5 must be from 1 to 4"):
        pool.run(5, rank_functions.crashes, None, "", timeout=1)
    with pytest.raises(RankError, match=r"rank 1 failed:[\s\S]*ZeroDivisionError"):
        pool.run(2, rank_functions.crashes, None, "", timeout=60)


def draw_of(cell: Cell) -> Draw:
    """The layout of a cell of the tests' matrix as a draw."""
    values = {
        "parallelism.tensor": cell.tensor,
        "parallelism.pipeline": cell.pipeline,
        "parallelism.data": cell.data,
        "parallelism.context": cell.context,
        "parallelism.dp_replicate": cell.replicate,
        "parallelism.zero": cell.zero,
        "parallelism.schedule": cell.schedule,
        "parallelism.sequence": str(cell.sequence).lower(),
        "accumulation": cell.accumulation,
    }
    drawn = {f"{key}={value}" for key, value in values.items()}
    draw = DEFAULT | {name: value for name, axis in AXES.items() for value in axis.values if value in drawn}
    draw["layers"] = "model.num_layers=4"
    return draw


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BUGS if not name.startswith("expert:")])
def test_the_bugs_of_every_axis_are_found(name, oracle: Oracle):
    draw = draw_of(BUGS[name].cell)
    assert judged(oracle, draw, partial(rank_functions.with_bug, name)).kind == "parity"
    assert judged(oracle, draw).ok
