import json
import math
from datetime import UTC, datetime, timedelta

from gptlite.metrics.jsonl import JsonlSink, read_rows, truncate_after


def write(path, steps, **row):
    sink = JsonlSink(path)
    for step in steps:
        sink.write({"step": step, **row})
    sink.close()


def test_a_row_is_on_disk_when_write_returns(tmp_path):
    sink = JsonlSink(tmp_path / "run" / "metrics.jsonl")
    sink.write({"step": 1, "loss": 2.5, "mfu": None})
    (row,) = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert row["step"] == 1
    assert row["loss"] == 2.5
    assert row["mfu"] is None
    stamp = datetime.fromisoformat(row["time"])
    assert stamp.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - stamp) < timedelta(minutes=1)
    sink.close()
    sink.close()


def test_every_line_is_strict_json_though_the_loss_is_not_finite(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1], loss=math.nan, grad_norm=math.inf)

    def refuse(constant):
        raise AssertionError(constant)

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert row["loss"] is None
    assert row["grad_norm"] is None


def test_a_resumed_run_has_each_step_once_and_nothing_is_lost(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [10, 20, 30, 40], loss=1.0)
    assert truncate_after(path, 20) == 2
    write(path, [30, 40, 50], loss=2.0)
    assert [(row["step"], row["loss"]) for row in read_rows(path)] == [(10, 1), (20, 1), (30, 2), (40, 2), (50, 2)]
    truncate_after(path, 40)
    replaced = read_rows(tmp_path / "metrics.replaced.jsonl")
    assert [(row["step"], row["loss"]) for row in replaced] == [(30, 1), (40, 1), (50, 2)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.replaced.jsonl"]


def test_a_line_cut_by_a_kill_does_not_swallow_the_next_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [10, 20])
    with path.open("ab") as file:
        file.write(b'{"step": 30, "loss": 1.\xe2')
    assert [row["step"] for row in read_rows(path)] == [10, 20]
    assert truncate_after(path, 20) == 1
    write(path, [30])
    assert [row["step"] for row in read_rows(path)] == [10, 20, 30]


def test_a_row_that_lacks_only_its_newline_keeps_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10}\n{"step": 20}')
    truncate_after(path, 20)
    write(path, [30])
    assert [row["step"] for row in read_rows(path)] == [10, 20, 30]


def test_nothing_to_cut_leaves_the_file_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert truncate_after(path, 0) == 0
    write(path, [10, 20])
    inode = path.stat().st_ino
    assert truncate_after(path, 20) == 0
    assert path.stat().st_ino == inode
    assert not (tmp_path / "metrics.replaced.jsonl").exists()
