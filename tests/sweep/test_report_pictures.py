"""A sweep's pictures: which there are, what they show, and that none of them ends a sweep."""

import json
import struct
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from gptlite.sweep import report_pictures
from gptlite.sweep.record import FAILED, Record
from gptlite.sweep.report import write_reports
from gptlite.sweep.report_pictures import Picture, draw_all
from gptlite.sweep.report_rows import rows_of
from sweep.report_records import pipeline, predicted, record, sweep


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that were drawn, by their file. Not rendered, which takes most of the time."""
    found: dict[str, Figure] = {}

    def keep(figure: Figure, file: str, title: str, caption: str) -> Picture:
        found[file] = figure
        return Picture(file, title, caption, b"")

    monkeypatch.setattr(report_pictures, "_picture", keep)
    return found


def drawn(folder: Path, records: list[Record]) -> list[str]:
    """Draws, and returns what was logged."""
    lines: list[str] = []
    draw_all(folder, rows_of(records), lines.append)
    return lines


def curves(folder: Path, records: list[Record], steps: int = 20) -> None:
    """A metrics.jsonl for each cell, whose losses are apart by a thousandth of the cell's number."""
    for each in records:
        run = folder / each.run_dir
        run.mkdir(exist_ok=True)
        rows = [{"step": step, "loss": 5 / step + each.number / 1000} for step in range(1, steps + 1)]
        rows.append({"step": steps, "val_loss": 5.0})
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 2')


def texts(figure: Figure) -> str:
    return " | ".join(text.get_text() for axes in figure.axes for text in axes.texts)


def labels(axes) -> list[str]:
    return [text.get_text() for text in axes.get_yticklabels()]


def test_a_sweep_has_its_pictures_and_the_page_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report_pictures, "DPI", 30)
    curves(tmp_path, sweep()[:3])
    lines: list[str] = []
    write_reports(tmp_path, sweep(), lines.append, final=True)
    assert lines == []
    names = ["losses.png", "memory.png", "throughput.png", "timeline-1f1b-2-ranks-8-micro-batches.png"]
    assert sorted(path.name for path in tmp_path.glob("*.png")) == names
    for name in names:
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert min(struct.unpack(">II", data[16:24])) > 30
    page = (tmp_path / "sweep.html").read_text()
    assert page.count("<img alt='") == page.count("src='data:image/png;base64,iVBOR") == 4
    assert "goes on" not in page
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_bars_are_as_long_as_the_figures(tmp_path: Path, figures: dict[str, Figure]):
    assert drawn(tmp_path, sweep()) == []
    speed, memory = figures["throughput.png"].axes
    assert labels(speed) == ["ddp", "pp2", "single", "zero3", "tp3", "tp2"]  # the fastest first
    assert [bar.get_width() for bar in speed.patches] == [4000, 3000, 2500]
    assert [bar.get_width() / 2**20 for bar in memory.patches] == [301, 25] * 3
    words = texts(figures["throughput.png"])
    assert "2.50k, MFU 31.2%" in words
    assert "out of memory: rank 1: cannot allocate 134217728 bytes" in words
    (diamond,) = speed.lines
    assert diamond.get_xdata()[0] == pytest.approx(4000 * 0.1 / 0.11)


def test_memory_is_stacked_by_category_and_rank(tmp_path: Path, figures: dict[str, Figure]):
    assert drawn(tmp_path, sweep()[1:3]) == []
    (axes,) = figures["memory.png"].axes
    assert labels(axes) == ["ddp  rank 0", "rank 1", "pp2  rank 0", "rank 1"]
    widths = [[bar.get_width() / 2**20 for bar in bars] for bars in axes.containers]
    assert widths == [[4] * 4, [4] * 4, [8] * 4, [9, 8, 9, 8]]
    assert [bar.get_x() / 2**20 for bar in axes.containers[3]] == [16] * 4
    assert texts(figures["memory.png"]) == "25.0 MiB | 24.0 MiB | 25.0 MiB | 24.0 MiB"


def test_losses_lie_over_each_other_with_their_distances(tmp_path: Path, figures: dict[str, Figure]):
    records = sweep()[:3]
    curves(tmp_path, records)
    (tmp_path / records[2].run_dir / "metrics.jsonl").unlink()
    assert drawn(tmp_path, records) == []
    loss, apart = figures["losses.png"].axes
    assert [line.get_label() for line in loss.lines] == ["single", "ddp"]
    assert list(loss.lines[1].get_xdata()) == list(range(1, 21))
    assert loss.lines[0].get_ydata()[4] == 1.0
    (line,) = apart.lines
    assert list(line.get_ydata()) == pytest.approx([0.001] * 20)


def test_a_timeline_has_every_pass(tmp_path: Path, figures: dict[str, Figure]):
    assert drawn(tmp_path, sweep()) == []
    (axes,) = figures["timeline-1f1b-2-ranks-8-micro-batches.png"].axes
    assert len(axes.patches) == 2 * 2 * 8
    busy = sum(bar.get_width() for bar in axes.patches) / 2
    assert busy == pytest.approx(50)  # milliseconds that a rank computes
    assert axes.get_xlim()[1] == pytest.approx(50 * 9 / 8)
    assert axes.get_title("right") == "bubble 11.1% of the step"


def test_one_timeline_a_schedule(tmp_path: Path, figures: dict[str, Figure]):
    kinds = [pipeline(), pipeline(), pipeline("zbv", 2, 2), pipeline("of tomorrow"), pipeline("gpipe", 4)]
    records = [record(n, f"c{n}", result={"pipeline": each}) for n, each in enumerate(kinds)]
    assert drawn(tmp_path, records) == []
    assert sorted(path.name.split("-")[1] for path in tmp_path.glob("timeline-*")) == ["1f1b", "gpipe", "zbv"]
    names = figures["timeline-zbv-2-ranks-2-stages-a-rank-8-micro-batches.png"].legends[0].get_texts()
    words = [text.get_text() for text in names]
    assert words[0] == "forward"
    assert words[-1] == "gradients of weights"


def test_without_the_planner_there_is_no_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figures: dict):
    monkeypatch.setitem(sys.modules, "gptlite.plan.timeline", None)
    rows = rows_of(sweep())
    assert (rows[2].bubble, rows[2].communication) == (None, pytest.approx(0.05))
    assert drawn(tmp_path, sweep()) == []
    assert "throughput.png" in figures
    assert not list(tmp_path.glob("timeline-*"))


@pytest.mark.parametrize("count", [0, 1, 100])
def test_any_number_of_cells(tmp_path: Path, figures: dict[str, Figure], count: int):
    records = [record(n, f"cell{n}", predicted=predicted()) for n in range(count)]
    curves(tmp_path, records, steps=1)
    assert drawn(tmp_path, records) == []
    assert bool(figures) == bool(count)
    if count == 100:
        assert len(labels(figures["throughput.png"].axes[0])) == report_pictures.MOST_BARS
        assert len(labels(figures["memory.png"].axes[0])) == report_pictures.MOST_RANK_BARS
        assert len(figures["losses.png"].legends[0].get_texts()) == report_pictures.MOST_CURVES
        assert max(figure.get_size_inches()[1] for figure in figures.values()) < 20


def test_odd_cells_are_drawn_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report_pictures, "DPI", 30)
    name = "$_{x}$ \\frac 字 🙂 <b>"
    records = [
        record(0, name, predicted=predicted(), result={"step_seconds": 0.0, "loss": None}),
        record(1, "_hidden", status=FAILED, reason="$\\bad$" * 50, result={"memory_ranks": [], "step_seconds": None}),
        record(2, "zero", result={"tokens_per_second": 0.0, "memory_ranks": [{}, {"parameters": 0}]}),
        Record(3, "none", [], FAILED, "", "x" * 5000),
    ]
    curves(tmp_path, records[:2])
    (tmp_path / records[2].run_dir).mkdir()
    (tmp_path / records[2].run_dir / "metrics.jsonl").write_bytes(b'\xff\xfe\n{"step": 1, "loss": NaN}\n[]\n')
    assert drawn(tmp_path, records) == []
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["losses.png", "memory.png", "throughput.png"]


def test_cells_that_never_ran_have_no_pictures(tmp_path: Path, figures: dict[str, Figure]):
    assert drawn(tmp_path, sweep()[3:]) == []
    assert figures == {}


def test_a_picture_that_fails_is_a_line_and_the_others_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise ValueError("no ink")

    monkeypatch.setattr(report_pictures, "_speed", fail)
    assert drawn(tmp_path, sweep()[:2]) == ["warning: sweep report: no picture of speed and memory: ValueError: no ink"]
    assert [path.name for path in tmp_path.glob("*.png")] == ["memory.png"]


def test_the_losses_of_cells_that_train_different_models_are_not_called_the_same(tmp_path):
    records = []
    for number, rate in enumerate((1e-3, 1e-2)):
        (run := tmp_path / f"{number}-lr").mkdir()
        losses = [{"step": step, "loss": 5 - rate * step} for step in (1, 2, 3)]
        rows = [*losses, {"step": 3, "val_loss": 5 - rate}]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        records.append(record(number, f"lr={rate}", overrides=[f"optimizer.lr={rate}"], run_dir=str(run)))
    (picture,) = [each for each in draw_all(tmp_path, rows_of(records), pytest.fail) if each.file == "losses.png"]
    assert picture.caption == "Cells that differ in optimizer.lr train different models."
