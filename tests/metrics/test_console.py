import math

import pytest

from gptlite.metrics.console import (
    WIDTH,
    banner,
    eval_line,
    format_bytes,
    format_count,
    format_duration,
    step_line,
    table,
)

ROW = {
    "step": 120,
    "loss": 3.45123,
    "lr": 3e-3,
    "grad_norm": 0.8123,
    "tokens_per_second": 12345.0,
    "mfu": None,
    "memory_allocated_bytes": int(0.91 * 2**30),
}


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *[
            (0, "0"),
            (87, "87"),
            (999, "999"),
            (999.6, "1.00k"),
            (12345, "12.3k"),
            (999_999, "1.00M"),
            (124_439_808, "124M"),
        ],
        *[(9_996, "10.0k"), (99_960, "100k"), (1.5e9, "1.50B"), (3.2e12, "3.20T"), (5e15, "5000T"), (-1500, "-1.50k")],
    ],
)
def test_counts_have_three_digits(number, text):
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(512, "512 B"), (1536, "1.50 KiB"), (1000 * 2**20, "0.98 GiB"), (80 * 2**30, "80.0 GiB"), (2**50, "1024 TiB")],
)
def test_bytes_use_binary_units(number, text):
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (151, "2m31s"),
        (3599.7, "1h00m"),
        (3900, "1h05m"),
        (273_600, "3d04h"),
        (math.inf, "n/a"),
        (math.nan, "n/a"),
    ],
)
def test_durations_carry_into_the_next_unit(seconds, text):
    assert format_duration(seconds) == text


def test_step_line_is_the_documented_one():
    assert step_line(ROW, 1000, 151) == (
        "step  120/1000  loss  3.4512  lr 3.0e-03  norm   0.81  12.3k tok/s  ETA 2m31s"  # without MFU: it is not known
    )


def test_columns_keep_their_place_over_a_run():
    early = ROW | {"step": 1, "loss": 10.8, "grad_norm": 153.2, "tokens_per_second": 999.0}
    late = ROW | {"step": 1000, "loss": math.nan, "grad_norm": 3.2e6, "tokens_per_second": 1.2e6}
    for mfu in (None, 0.1):
        lines = [step_line(row | {"mfu": mfu}, 1000, eta) for row, eta in ((ROW, 9), (early, 9e4), (late, None))]
        places = [[line.index(label) for label in ("loss", "norm", "tok/s", "ETA")] for line in lines]
        assert places[0] == places[1] == places[2]
        assert ("MFU 10.0%" in lines[0]) == (mfu is not None)


@pytest.mark.parametrize("steps", [10, 1000, 600_000])
@pytest.mark.parametrize("unit", ["tokens", "samples"])
def test_a_step_line_fits_a_terminal(steps: int, unit: str):
    """Of what is known, the memory and then the learning rate are left out first."""
    most = {"loss_scale": 65536.0, "epoch": 12.34, "mfu": 0.412, "train_accuracy": 0.5, "train_auxiliary": 0.25}
    for row in (ROW, ROW | most, *(ROW | {key: value} for key, value in most.items())):
        line = step_line(row, steps, 151, unit)
        assert len(line) <= WIDTH
        assert all(label in line for label in ("step ", "loss ", "/s", "ETA 2m31s"))
        assert "mem" not in line or "lr" in line


def test_lines_are_single_ascii_lines_even_where_nothing_is_known():
    for line in (step_line({"step": 1}, 10), step_line(ROW | {"loss_scale": 65536.0}, 1000, math.inf)):
        assert line.isascii()
        assert line.isprintable()
    assert "scale 65536" in step_line(ROW | {"loss_scale": 65536.0}, 1000)
    assert step_line({"step": 1}, 10) == "step  1/10  loss     n/a  lr     n/a  norm    n/a    n/a tok/s  ETA n/a"


def test_eval_line_shows_both_units_of_loss():
    row = {"step": 250, "val_loss": 3.612, "val_bits_per_byte": 1.9042}
    assert eval_line(row, 1000) == "eval  250/1000  val loss  3.6120 nats/token  1.9042 bits/byte"
    assert eval_line(row | {"val_bits_per_byte": None}, 1000) == "eval  250/1000  val loss  3.6120 nats/token"


def test_control_characters_in_tables_are_escaped():
    evil = "a\x1b[2J\rb\nc\u202e"
    lines = list(table(("key", "value"), [(evil, "1"), ("b", evil)], right="value"))
    assert len({len(line) for line in lines}) == 1
    assert all(line.isprintable() for line in lines)
    assert all(line.isprintable() for line in banner([("data", evil), (evil, "")]).split("\n"))


def test_banner_aligns_values_and_wraps_within_its_width():
    text = banner([("model", "gpt-lite"), ("data", "word " * 60), ("", "more")], title="gptlite 1.2")
    lines = text.splitlines()
    assert lines[0].startswith("== gptlite 1.2 ==")
    assert {len(lines[0]), len(lines[-1])} == {WIDTH}
    assert max(map(len, lines)) == WIDTH
    assert lines[1] == "  model  gpt-lite"
    assert all(line.startswith(" " * 9 + "word") for line in lines[3:-2])
    assert lines[-2] == " " * 9 + "more"
