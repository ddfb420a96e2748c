"""The best cell: by validation loss where an axis changes the numbers, by speed where none can."""

import pytest

from gptlite.sweep.judge import changes_numbers, judge
from gptlite.sweep.record import FAILED
from gptlite.sweep.report_rows import rows_of
from gptlite.sweep.report_table import best_words, table

from .report_records import record


def rates(**third):
    """A sweep of learning rates; the worst is the fastest, by 3%."""
    figures = {"0.001": (3.9, 20600.0), "0.003": (3.8, 20000.0), "0.03": (7.5, 21200.0)}
    records = [
        record(number, f"lr={rate}", overrides=["model=gpt-lite", f"optimizer.lr={rate}"],
               result={"val_loss": loss, "val_bits_per_byte": 2.0, "loss": 3.0, "tokens_per_second": speed})
        for number, (rate, (loss, speed)) in enumerate(figures.items())
    ]  # fmt: skip
    return [*records[:2], records[2] if not third else record(2, "lr=0.03", overrides=["optimizer.lr=0.03"], **third)]


@pytest.mark.parametrize(
    ("key", "changes"),
    [("optimizer.lr", True), ("optimizer", True), ("seed", True), ("model", True), ("model.peak_lr", True),
     ("data.global_batch_size", True), ("schedule.warmup_steps", True), ("trainer.max_steps", True),
     ("experiment", True), ("precision", True), ("parallelism", False),
     ("parallelism.tensor", False), ("data.micro_batch_size", False),
     ("ops", False), ("trainer.compile", False), ("trainer.log_interval", False), ("checkpoint.interval", False),
     ("checkpoint.resume", True), ("model.name", False), ("cluster.nodes", False), ("data.cache_dir", False)],
)  # fmt: skip
def test_which_keys_change_the_numbers(key, changes):
    assert changes_numbers(key) is changes


def test_learning_rates_are_judged_by_validation_loss():
    rows = rows_of(rates())
    assert [row.name for row in rows if row.is_best] == ["lr=0.003"]
    assert best_words(rows) == "lr=0.003: validation loss 3.8000, 0.1000 below lr=0.001's"
    assert "by    validation loss, since optimizer.lr changes the numbers" in table(rates())
    header, lines = table(rates()).splitlines()[1], table(rates()).splitlines()
    assert "val loss" in header
    assert any(line.startswith("*lr=0.003") and "3.8000" in line for line in lines)


def test_a_cell_that_failed_is_not_the_best_whatever_its_loss():
    rows = rows_of(rates(status=FAILED, result={"val_loss": 0.1}))
    assert [row.name for row in rows if row.is_best] == ["lr=0.003"]


def test_of_cells_with_the_same_numbers_the_fastest():
    figures = [("single", 1e-3, 3.9, 10.0), ("single", 3e-3, 3.8000001, 10.0), ("tp2", 3e-3, 3.8000002, 30.0)]
    rows = rows_of([
        record(number, f"{layout} lr={rate}", overrides=[f"parallelism={layout}", f"optimizer.lr={rate}"],
               result={"val_loss": loss, "tokens_per_second": speed})
        for number, (layout, rate, loss, speed) in enumerate(figures)
    ])  # fmt: skip
    assert [row.name for row in rows if row.is_best] == ["tp2 lr=0.003"]


def test_without_validation_the_training_loss_decides_and_tokenizers_compare_by_byte():
    rows = rows_of([record(n, f"lr={n}", overrides=[f"optimizer.lr={n}"], result={"loss": 5.0 - n}) for n in (1, 2)])
    assert [row.name for row in rows if row.is_best] == ["lr=2"]
    assert "training loss, for want of a validation loss" in best_words(rows)
    figures = [("char", 1.5, 1.9), ("byte", 1.4, 2.1)]
    rows = rows_of([
        record(0, kind, overrides=[f"data.tokenizer={kind}"], result={"val_loss": nats, "val_bits_per_byte": bits})
        for kind, nats, bits in figures
    ])  # fmt: skip
    assert [row.name for row in rows if row.is_best] == ["char"]
    assert "bits per byte" in best_words(rows)


def test_layouts_are_judged_by_speed_and_noise_is_called_so():
    rows = rows_of([record(0, "single", result={"tokens_per_second": 100.0, "val_loss": 1.0}),
                    record(1, "tp2", result={"tokens_per_second": 103.0, "val_loss": 1.0})])  # fmt: skip
    assert judge(rows).by_speed
    assert best_words(rows) == "tp2: 103 tokens/s, 1.03 times single's, which is within the noise"
    assert judge(rows).words == "speed, since no axis changes the numbers"
