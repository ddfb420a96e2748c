"""The figures of a sweep's cells: what is derived, what is best, and what odd records come to."""

import math
from typing import Any

import pytest

from gptlite.sweep.record import FAILED, OK, Record
from gptlite.sweep.report_rows import agreement, number, one_line, rows_of, split
from gptlite.sweep.report_timeline import bubble_share, schedule_words, timeline_of
from sweep.report_records import MIB, pipeline, predicted, record, result, sweep


def test_figures_of_a_cell():
    row = rows_of(sweep())[1]
    assert (row.speed, row.speed_per_rank, row.mfu) == (4000.0, 2000.0, None)
    assert row.peaks == (300 * MIB, 301 * MIB)
    assert row.peak == 301 * MIB
    assert row.tensors == 25 * MIB  # of rank 0, which has most
    assert (row.compute, row.communication, row.bubble) == (pytest.approx(0.07), pytest.approx(0.03), 0.0)
    assert row.difference == pytest.approx(2e-7)
    assert (row.predicted_step, row.predicted_memory) == (0.11, 27 * MIB)
    assert row.wall == 12.0
    assert row.is_best
    assert not row.is_baseline


def test_the_parts_of_a_step_add_up_to_it():
    for row in rows_of(sweep())[:3]:
        assert row.step == pytest.approx(row.compute + row.communication + row.bubble)


def test_the_bubble_is_what_the_schedule_makes_ranks_wait_and_no_more_than_they_did():
    # Of two ranks and eight micro-batches a ninth of the time: an eighth of what a rank computes.
    comm = {"pp": 0.04, "tp": 0.008, "world": 0.01}
    compute, communication, bubble = split(0.1, comm, pipeline())
    assert compute == pytest.approx(0.042)
    assert bubble == pytest.approx((0.042 + 0.008) / 8)
    assert communication == pytest.approx(0.058 - (0.042 + 0.008) / 8)
    assert split(0.1, {"pp": 0.001}, pipeline()) == (pytest.approx(0.099), 0.0, 0.001)  # it waited less than that
    assert split(0.1, {"pp": 0.04}, pipeline("of tomorrow")) == (pytest.approx(0.06), 0.04, None)
    assert split(None, comm, None) == (None, None, None)


def ordered(*steps: tuple[float, float]) -> list[Record]:
    """Cells by their planned and measured steps."""
    return [
        record(place, f"c{place}", predicted=predicted(plan), result={"step_seconds": step})
        for place, (plan, step) in enumerate(steps)
    ]


def test_the_plans_order_is_held_against_the_measured_one():
    same = ordered((1, 2), (2, 3), (3, 5), (4, 9))
    assert agreement(rows_of(same)) == pytest.approx(1)
    assert agreement(rows_of(ordered((4, 2), (3, 3), (2, 5), (1, 9)))) == pytest.approx(-1)
    assert agreement(rows_of(same[:3])) is None
    assert agreement(rows_of(ordered((1, 2), (2, 2), (3, 2.05), (4, 2)))) is None  # all alike
    # By hand: measured ranks 1, 1, 2.5, 3.5 (the first two within 5%), planned 0.5 to 3.5: 4.5 / sqrt(4.5 x 5).
    assert agreement(rows_of(ordered((1, 1.04), (2, 1), (3, 2), (4, 3)))) == pytest.approx((4.5 / 5) ** 0.5)


def test_clocks_that_disagree_do_not_make_compute_negative():
    assert split(0.1, {"dp": 0.11}, None)[0] == 0.0


@pytest.mark.parametrize(
    ("schedule", "stages", "expected"),
    [("gpipe", 1, 3 / 11), ("1f1b", 1, 3 / 11), ("interleaved_1f1b", 2, 1.5 / 9.5)],
)
def test_bubbles_of_equal_stages(schedule: str, stages: int, expected: float):
    assert bubble_share(timeline_of(pipeline(schedule, 4, stages))) == pytest.approx(expected)


def test_a_timeline_is_scaled_to_the_time_that_ranks_compute():
    found = timeline_of(pipeline(), compute=0.24)
    assert found is not None
    assert sum(event.end - event.start for event in found.events if event.rank == 0) == pytest.approx(0.24)
    again = timeline_of(pipeline() | {"activation_checkpointing": "full"}, compute=0.24)
    assert again is not None
    backward = next(event for event in again.events if event.kind == "B")
    assert backward.end - backward.start == pytest.approx(0.24 / 8 * 3 / 4)


@pytest.mark.parametrize(
    "change",
    [
        {"schedule": "of tomorrow"},
        {"stage_flops": [1]},
        {"stage_flops": [0, 0]},
        {"ranks": None},
        {"micro_batches": 10**9},
        {"micro_batches": 1},
    ],
)
def test_a_timeline_that_cannot_be_said_is_none(change: dict[str, Any]):
    assert timeline_of(pipeline() | change) is None
    assert timeline_of({}) is None


def test_a_schedule_in_words():
    assert schedule_words(pipeline()) == "1f1b, 2 ranks, 8 micro-batches"
    assert schedule_words(pipeline("zbv", 4, 2)) == "zbv, 4 ranks, 2 stages a rank, 8 micro-batches"


def test_the_baseline_is_single_else_the_first_that_is_ok():
    def names(records: list[Record]) -> list[str]:
        return [row.name for row in rows_of(records) if row.is_baseline]

    assert names(sweep()) == ["single"]
    assert names([sweep()[2], sweep()[1], sweep()[0]]) == ["single"]
    assert names([sweep()[5], sweep()[2], sweep()[1]]) == ["pp2"]
    assert names([record(0, "0", overrides=["parallelism=ddp"]), record(1, "1", overrides=["parallelism=single"])]) == [
        "1"
    ]
    assert names([record(0, "single", status=FAILED), record(1, "ddp")]) == ["ddp"]
    assert names([sweep()[4]]) == names([]) == []


def test_losses_of_different_steps_are_not_compared():
    rows = rows_of([record(0, "single"), record(1, "ddp", result={"step": 19}), record(2, "tp2")])
    assert [row.difference for row in rows] == [0.0, None, 0.0]


def test_the_best_is_the_fastest_that_is_ok():
    rows = rows_of([*sweep(), record(6, "fast", status=FAILED, result={"tokens_per_second": 9e9})])
    assert [row.name for row in rows if row.is_best] == ["ddp"]
    equal = rows_of([record(0, "a"), record(1, "b")])
    assert [row.name for row in equal if row.is_best] == ["a"]
    assert not any(row.is_best for row in rows_of([sweep()[3]]))


@pytest.mark.parametrize(
    "bad",
    [
        {},
        result(tokens_per_second=math.nan, step_seconds=math.inf, mfu="fast", loss=None, comm_seconds=None),
        result(comm_seconds=[1], memory_ranks=3, pipeline="1f1b", step=None, memory_peak_bytes=None),
        result(comm_seconds={"tp": "a", "dp": math.nan}, memory_ranks=[None, {"peak": "x"}, 4], world_size="two"),
        result(tokens_per_second=True, memory_ranks=[{"parameters": None, "peak": None}], pipeline={"ranks": 2}),
        result(tokens_per_second=0.0, step_seconds=0.0),
        [],
        None,
    ],
)
def test_odd_results_have_fewer_figures(bad: Any):
    odd = Record(0, "odd", ["parallelism=ddp"], OK, result=bad, predicted={"memory": {"parameters": "x"}})
    odd.predicted = {"memory": [1], "step_seconds": math.nan}
    rows = rows_of([odd, record(1, "good", result={"tokens_per_second": 5000.0})])
    assert rows[1].is_best
    values = [value for value in vars(rows[0]).values() if isinstance(value, float)]
    assert all(math.isfinite(value) for value in values)
    assert rows[0].predicted_step is rows[0].predicted_memory is None


def test_old_results_have_the_peak_of_rank_0():
    assert rows_of([record(0, "old", result={"memory_ranks": None})])[0].peaks == (300 * MIB,)


def test_predictions_that_are_one_number():
    told = predicted() | {"memory": 7 * MIB}
    assert rows_of([record(0, "a", predicted=told)])[0].predicted_memory == 7 * MIB


def test_numbers_and_lines():
    assert [number(value) for value in (1, 2.5, True, None, "3", math.nan, -math.inf)] == [1, 2.5] + [None] * 5
    assert one_line("a\n  b\t\x1b[1mc\0") == "a b [1mc"
    assert one_line("x" * 5000) == "x" * 1997 + "..."
    assert one_line(None) == ""
