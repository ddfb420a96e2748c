"""Cells side by side: what is derived, the baseline, the best and what it is judged by."""

from typing import Any

import pytest

from gptlite.satellites.sweep.compare import bubble_share, changes_numbers, compare, schedule_words, split, timeline_of
from gptlite.satellites.sweep.folder import FAILED, Record
from gptlite.satellites.sweep.table import table
from sweep.report_records import MIB, pipeline, predicted, record, sweep


def best_of(*records: Record) -> str | None:
    found = compare(records)
    assert [row["name"] for row in found.rows if row["best"]] == ([found.best["name"]] if found.best else [])
    return found.best and found.best["name"]


def test_the_parts_of_a_step_add_up_to_it() -> None:
    for row in compare(sweep()[:3]).rows:
        parts = [row[f"{part}_seconds"] for part in ("compute", "communication", "bubble")]
        assert row["step_seconds"] == pytest.approx(sum(parts))


def test_the_bubble_is_what_the_schedule_makes_ranks_wait_and_no_more_than_they_did() -> None:
    # Of two ranks and eight micro-batches a ninth of the time: an eighth of what a rank computes.
    comm = {"pp": 0.04, "tp": 0.008, "world": 0.01}
    compute, communication, bubble = split(0.1, comm, pipeline())
    assert compute == pytest.approx(0.042)
    assert bubble == pytest.approx((0.042 + 0.008) / 8)
    assert communication == pytest.approx(0.058 - (0.042 + 0.008) / 8)
    assert split(0.1, {"pp": 0.001}, pipeline()) == (pytest.approx(0.099), 0.0, 0.001)  # it waited less than that
    assert split(0.1, {"pp": 0.04}, pipeline("of tomorrow")) == (pytest.approx(0.06), 0.04, None)
    assert split(None, comm, None) == (None, None, None)
    assert split(0.1, {"dp": 0.11}, None)[0] == 0.0  # clocks that disagree


@pytest.mark.parametrize(
    ("schedule", "stages", "expected"),
    [("gpipe", 1, 3 / 11), ("1f1b", 1, 3 / 11), ("interleaved_1f1b", 2, 1.5 / 9.5)],
)
def test_bubbles_of_equal_stages(schedule: str, stages: int, expected: float) -> None:
    found = timeline_of(pipeline(schedule, 4, stages))
    assert found is not None
    assert bubble_share(found) == pytest.approx(expected)


def test_a_timeline_is_scaled_to_the_time_that_ranks_compute() -> None:
    found = timeline_of(pipeline(), compute=0.24)
    again = timeline_of(pipeline() | {"activation_checkpointing": "full"}, compute=0.24)
    assert found is not None
    assert again is not None
    assert found.busy(0) == pytest.approx(0.24)
    backward = next(event for event in again.events if event.kind == "B")
    assert backward.end - backward.start == pytest.approx(0.24 / 8 * 3 / 4)
    assert timeline_of(pipeline() | {"micro_batches": 10**9}) is None  # it would take long, and be grey


def test_a_schedule_in_words() -> None:
    assert schedule_words(pipeline()) == "1f1b, 2 ranks, 8 micro-batches"
    assert schedule_words(pipeline("zbv", 4, 2)) == "zbv, 4 ranks, 2 stages per rank, 8 micro-batches"


def rank_correlation(*steps: tuple[float, float]) -> float | None:
    """Of cells by their planned and measured steps."""
    found = compare([
        record(place, f"c{place}", predicted=predicted(plan), result={"step_seconds": step})
        for place, (plan, step) in enumerate(steps)
    ])  # fmt: skip
    return float(found.plan_words[0].rpartition(" ")[2]) if found.plan_words else None


def test_the_plans_order_is_held_against_the_measured_one() -> None:
    same = ((1, 2), (2, 3), (3, 5), (4, 9))
    assert rank_correlation(*same) == 1
    assert rank_correlation((4, 2), (3, 3), (2, 5), (1, 9)) == -1
    assert rank_correlation(*same[:3]) is None
    assert rank_correlation((1, 2), (2, 2), (3, 2.05), (4, 2)) is None  # all alike
    # By hand: measured ranks 1, 1, 2.5, 3.5 (the first two within 5%), planned 0.5 to 3.5: 4.5 / sqrt(4.5 x 5).
    assert rank_correlation((1, 1.04), (2, 1), (3, 2), (4, 3)) == pytest.approx((4.5 / 5) ** 0.5, abs=0.005)


def test_the_baseline_is_single_else_the_first_that_is_ok() -> None:
    def name(*records: Record) -> str | None:
        base = compare(records).baseline
        return base and base["name"]

    single, ddp, pp2, _, pruned, failed = sweep()
    assert name(pp2, ddp, single) == "single"
    assert name(failed, pp2, ddp) == "pp2"
    assert name(record(0, "0", overrides=["parallelism=ddp"]), record(1, "1", overrides=["parallelism=single"])) == "1"
    assert name(record(0, "single", status=FAILED), ddp) == "ddp"
    assert name(pruned) is None
    rows = compare([record(0, "single"), record(1, "ddp", result={"step": 19}), record(2, "tp2")]).rows
    assert [row["loss_minus_baseline"] for row in rows] == [0.0, None, 0.0]  # of the same step alone


def test_old_results_have_the_peak_of_rank_0() -> None:
    assert compare([record(0, "old", result={"memory_ranks": None})]).rows[0]["memory_peak_bytes"] == 300 * MIB


@pytest.mark.parametrize(
    ("key", "changes"),
    [("optimizer.lr", True), ("optimizer", True), ("seed", True), ("model", True), ("model.peak_lr", True),
     ("data.global_batch_size", True), ("schedule.warmup_steps", True), ("trainer.max_steps", True),
     ("experiment", True), ("precision", True), ("parallelism", False),
     ("parallelism.tensor", False), ("data.micro_batch_size", False),
     ("ops", False), ("trainer.compile", False), ("trainer.log_interval", False), ("checkpoint.interval", False),
     ("checkpoint.resume", True), ("model.name", False), ("cluster.nodes", False), ("data.cache_dir", False)],
)  # fmt: skip
def test_which_keys_change_the_numbers(key: str, changes: bool) -> None:
    assert changes_numbers(key) is changes


def rates(**third: Any) -> list[Record]:
    """A sweep of learning rates; the worst is the fastest, by 3%."""
    figures = {"0.001": (3.9, 20600.0), "0.003": (3.8, 20000.0), "0.03": (7.5, 21200.0)}
    records = [
        record(number, f"lr={rate}", overrides=["model=gpt-lite", f"optimizer.lr={rate}"],
               result={"val_loss": loss, "val_bits_per_byte": 2.0, "loss": 3.0, "tokens_per_second": speed})
        for number, (rate, (loss, speed)) in enumerate(figures.items())
    ]  # fmt: skip
    return [*records[:2], records[2] if not third else record(2, "lr=0.03", overrides=["optimizer.lr=0.03"], **third)]


def test_learning_rates_are_judged_by_validation_loss() -> None:
    found = compare(rates())
    assert best_of(*rates()) == "lr=0.003"
    assert found.best_words == "lr=0.003: validation loss 3.8000, 0.1000 below lr=0.001's"
    lines = table(found, final=True).splitlines()
    assert "by    validation loss, since optimizer.lr changes the numbers" in lines
    assert "validation" in lines[1].split()
    assert any(line.startswith("*lr=0.003") and "3.8000" in line for line in lines)
    assert best_of(*rates(status=FAILED, result={"val_loss": 0.1})) == "lr=0.003"  # a cell that failed is not


def test_of_cells_with_the_same_numbers_the_fastest() -> None:
    figures = [("single", 1e-3, 3.9, 10.0), ("single", 3e-3, 3.8000001, 10.0), ("tp2", 3e-3, 3.8000002, 30.0)]
    records = [
        record(number, f"{layout} lr={rate}", overrides=[f"parallelism={layout}", f"optimizer.lr={rate}"],
               result={"val_loss": loss, "tokens_per_second": speed})
        for number, (layout, rate, loss, speed) in enumerate(figures)
    ]  # fmt: skip
    assert best_of(*records) == "tp2 lr=0.003"


def test_without_validation_the_training_loss_decides_and_tokenizers_compare_by_byte() -> None:
    records = [record(n, f"lr={n}", overrides=[f"optimizer.lr={n}"], result={"loss": 5.0 - n}) for n in (1, 2)]
    assert best_of(*records) == "lr=2"
    assert "training loss (no validation loss)" in compare(records).best_words
    figures = [("char", 1.5, 1.9), ("byte", 1.4, 2.1)]
    records = [
        record(n, kind, overrides=[f"data.tokenizer={kind}"], result={"val_loss": nats, "val_bits_per_byte": bits})
        for n, (kind, nats, bits) in enumerate(figures)
    ]
    assert best_of(*records) == "char"
    assert "bits per byte" in compare(records).best_words


def test_layouts_are_judged_by_speed_and_noise_is_called_so() -> None:
    found = compare([record(0, "single", result={"tokens_per_second": 100.0, "val_loss": 1.0}),
                     record(1, "tp2", result={"tokens_per_second": 103.0, "val_loss": 1.0})])  # fmt: skip
    assert found.best_words == "tp2: 103 tokens/s, 1.03 times single's, which is within the noise"
    assert found.judged_by == "speed, since no axis changes the numbers"
    assert best_of(record(0, "a"), record(1, "b")) == "a"  # of equal ones
    found = compare([record(0, "single", result={"loss": 3.0}), record(1, "pp2", result={"loss": 2.9})])
    assert found.judged_by == "speed; losses differ by 3.3%, e.g. because batch norm depends on the micro-batches"
    assert best_of(*sweep(), record(6, "fast", status=FAILED, result={"tokens_per_second": 9e9})) == "ddp"
    assert best_of(sweep()[3]) is None


def test_the_unit_of_speed_is_that_of_the_data() -> None:
    each = [record(n, name, result={"tokens_per_second": 10.0 + n, "unit": "samples"}) for n, name in enumerate("ab")]
    found = compare(each)
    assert "11 samples/s" in found.best_words
    assert "samples/s" in table(found, final=True)
    assert "tok/s" not in table(found, final=True)
    each[0].result.pop("unit")  # an older run
    assert compare(each).unit == "samples"
    each[0].result["unit"] = "tokens"
    assert compare(each).unit == "tokens"


@pytest.mark.parametrize("change", [{"micro_batches": 1}, {"stage_flops": [1.0]}, {"stage_flops": [0.0, 1.0]}])
def test_a_pipeline_that_cannot_be_has_no_timeline(change: dict) -> None:
    flops = {"stages_per_rank": 1, "stage_flops": [1.0, 2.0]}
    valid = {"ranks": 2, "schedule": "1f1b", "micro_batches": 2, **flops}
    assert timeline_of(valid) is not None
    assert timeline_of(valid | change) is None
