"""What a sweep leaves for a person: the table, sweep.csv, sweep.html, pictures. Whatever its cells are, none fails."""

import contextlib
import csv
import json
import math
import re
import struct
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from gptlite.invocation import command
from gptlite.satellites.sweep import pictures, report
from gptlite.satellites.sweep import table as tables
from gptlite.satellites.sweep.compare import compare
from gptlite.satellites.sweep.folder import FAILED, PRUNED, Record, SweepFolder
from gptlite.satellites.sweep.pictures import DASH
from gptlite.satellites.sweep.report import publish
from gptlite.satellites.sweep.table import shown, table
from sweep.report_records import MIB, pipeline, predicted, record, sweep

NASTY = """</td><script src="http://evil/x.js">alert('1')</script>&amp;<img src='//evil/y.png'> "quoted" $x$"""
TIMELINE = "timeline-1f1b-2-ranks-8-micro-batches.png"


class Page(HTMLParser):
    """Reads a page: the words of each row's cells, what it refers to, and whether what is opened is closed."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "tr" in self.open and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def written(folder: Path, records: list[Record], final: bool = False) -> list[str]:
    """Publishes the records and returns what was logged."""
    (folder / "records").mkdir(exist_ok=True)
    sweep_folder, lines = SweepFolder(folder), []
    with sweep_folder.updating(sweep_folder.header or {"overrides": [], "swept": []}):
        for each in records:
            sweep_folder.keep(each)
    publish(sweep_folder, final, lines.append)
    return lines


def page_of(folder: Path) -> Page:
    """The page, which needs no network."""
    text = (folder / "sweep.html").read_text(encoding="utf-8")
    page = Page(text)
    assert all(not re.match(r"(?!data:)[a-z+.-]+:|//", link, re.I) for link in page.links), page.links
    style = text[text.index("<style>") : text.index("</style>")]
    assert "@import" not in style
    assert "url(" not in style
    assert not re.search(r"""(src|href|srcset)\s*=\s*['"]?\s*https?:""", text, re.I)
    return page


def by_title(page: Page) -> list[dict[str, str]]:
    head, *cells = page.rows
    return [dict(zip(head, each, strict=True)) for each in cells]


def test_the_table_compares_the_cells_and_names_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert written(tmp_path, sweep(), final=True) == []
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].startswith("== sweep: 6 cells: 3 ok, 1 out of memory, 1 pruned, 1 failed ===")
    assert lines[1].split() == ["cell", "status", "tok/s", "step", "peak", "loss", "difference", "MFU"]
    assert re.split(r"\s{2,}", lines[2].strip()) == "single,ok,2.50k,100 ms,301 MiB,5.0000,0,31.2%".split(",")
    assert re.split(r"\s{2,}", lines[3]) == "*ddp,ok,4.00k,100 ms,301 MiB,5.0000,+2.0e-07,n/a".split(",")
    assert re.split(r"\s{2,}", lines[6].strip()) == ["tp3", "pruned", *["-"] * 6]
    text = "\n".join(lines)
    assert "zero3: out of memory: rank 1: cannot allocate 134217728 bytes" in text
    assert "model.num_heads=4" not in text  # said before the first cell ran
    assert "best  ddp: 4.00k tokens/s, 1.60 times single's" in text
    assert f"run   {command('train')} parallelism=ddp" in text
    (best,) = [row for row in compare(sweep()).rows if row["best"]]
    for preset, words in (("zero", "parallelism=ddp"), ("mine", "+sweep=mine parallelism=ddp hydra.mode=RUN")):
        alone = tables.command(best | {"overrides": [f"+sweep={preset}", "parallelism=ddp"]})
        assert alone == f"{command('train')} {words}"  # does not start the sweep again
    assert text.isascii()
    assert max(map(len, lines)) <= 80
    assert "\033" not in text
    # After a cell the table alone is said.
    written(tmp_path, [])
    assert capsys.readouterr().out.strip().splitlines() == [*lines[:8], "=" * 80]
    publish(SweepFolder(tmp_path), final=False, printed=False)
    assert capsys.readouterr().out == ""
    assert compare(sweep(), 8).counts.startswith("6 of 8 cells: 3 ok, ")
    bold = table(compare(sweep()), final=True, bold=True)
    assert [line.split()[0] for line in bold.splitlines() if "\033[1m" in line] == ["\033[1m*ddp"]
    assert bold.count("\033[1m") == bold.count("\033[0m")


def test_a_long_name_has_its_own_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["mlp=gelu_tanh,position=learned", "mlp=swiglu,position=rope"]
    written(tmp_path, [replace(each, name=name) for each, name in zip(sweep(), names, strict=False)])
    lines = [line.strip("* ") for line in capsys.readouterr().out.splitlines()]
    first = lines.index(names[0])
    assert lines[first + 1].split()[:2] == ["ok", "2.50k"]
    assert lines[first + 2].split()[:2] == [names[1], "ok"]


def test_csv_and_page_have_every_figure(tmp_path: Path) -> None:
    assert written(tmp_path, sweep()) == []
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "out of memory", "pruned", "failed"]
    ddp = rows[1]
    assert (ddp["best"], ddp["baseline"], rows[0]["baseline"]) == ("1", "0", "1")
    assert float(ddp["tokens_per_second_per_rank"]) == 2000
    assert ddp["memory_peak_bytes_of_each_rank"] == f"{300 * MIB} {301 * MIB}"
    assert int(ddp["memory_tensor_bytes"]) == 25 * MIB  # of rank 0, which has most
    assert int(ddp["memory_activations_bytes"]) == 9 * MIB
    assert float(rows[2]["bubble_seconds"]) == pytest.approx(0.00625)
    assert (float(ddp["predicted_step_seconds"]), int(ddp["predicted_memory_bytes"])) == (0.11, 27 * MIB)
    assert rows[4]["tokens_per_second"] == rows[4]["mfu"] == rows[4]["predicted_step_seconds"] == ""
    assert rows[4]["reason"] == "model.num_heads=4 is not divisible by 3"
    page = page_of(tmp_path)
    cells = by_title(page)
    assert [each["cell"] for each in cells] == ["single", "ddp", "pp2", "zero3", "tp3", "tp2"]
    expected = {
        **{"layout": "data 2 (zero 0)", "ranks": "2", "tok/s": "4.00k", "per rank": "2.00k", "peak": "301 MiB"},
        **{"average": "201 MiB", "utilisation": "87.5%", "of each rank": "300 MiB, 301 MiB", "compute": "70.0 ms"},
        **{"communication": "30.0 ms", "bubble": "0", "difference": "+2.0e-07", "planned vs step": "110 ms +10%"},
        **{"planned memory": "27.0 MiB +8%", "wall": "12s", "run folder": "1-ddp"},
    }
    assert expected.items() <= cells[1].items()
    assert list(cells[1])[:5] == ["cell", "status", "tok/s", "step", "peak"]  # the figure that decides comes first
    assert not {"validation", "bits per byte"} & cells[1].keys()  # no cell has one
    assert cells[0]["difference"] == "baseline"
    assert [cells[2][part] for part in ("compute", "communication", "bubble")] == ["50.0 ms", "43.8 ms", "6.25 ms"]
    assert (cells[5]["status"], cells[5]["reason"]) == ("failed", "RuntimeError: rank 1 <has> crashed & burned")
    text = (tmp_path / "sweep.html").read_text(encoding="utf-8")
    assert '<tr class="best"><th scope="row">ddp' in text
    assert "scroll it sideways" in text
    assert "The sweep is running" in text
    assert "script" not in page.tags


def test_the_column_that_decides_comes_first_and_empty_ones_not_at_all() -> None:
    rates = [record(n, f"lr{n}", overrides=[f"optimizer.lr={n}"], result={"val_loss": 3.0 - n}) for n in (1, 2)]
    titles = [column.title for column in shown(compare(rates))]
    assert titles[:4] == ["cell", "status", "validation", "tok/s"]
    assert not {"reason", "MFU", "bits per byte"} & set(titles)


def test_names_and_reasons_are_words_and_never_markup(tmp_path: Path) -> None:
    nasty = [
        record(0, NASTY, layout=NASTY, overrides=[NASTY], run_dir=NASTY),
        record(1, "b", status=FAILED, reason=NASTY),
        Record(2, NASTY, [NASTY], PRUNED, NASTY, f"http://evil/{NASTY}"),
    ]
    written(tmp_path, nasty)
    page = page_of(tmp_path)
    assert not {"script", "img"} & set(page.tags)
    assert len(page.rows) == 4
    assert all("script" in "".join(words) for words in page.rows[1:])


def test_control_characters_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b[2J\rb\nc\u202e"
    nasty = [
        record(0, evil, overrides=[f"run.name={evil}"], run_dir=f"{evil}/0"),
        record(1, evil * 9, status=FAILED, reason=evil, run_dir=f"{evil}/1"),
    ]
    assert written(tmp_path, nasty, final=True) == []
    printed = capsys.readouterr().out
    assert all(line.isprintable() for line in printed.split("\n")), printed
    assert r"a\x1b[2J\rb\nc\u202e" in printed
    page = (tmp_path / "sweep.html").read_text(encoding="utf-8")
    assert not {"\x1b", "\r", "\u202e"} & set(page)


def test_long_names_and_reasons_stay_in_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = [
        record(0, "n" * 3000, run_dir="0", status=FAILED, reason="line\n" * 9000, layout="l" * 500),
        record(1, "ok"),
    ]
    assert written(tmp_path, long, final=True) == []
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 20


@pytest.mark.parametrize("count", [1, 100])
def test_any_number_of_cells(tmp_path: Path, figures: dict[str, Figure], count: int) -> None:
    records = [
        record(n, f"cell{n}", predicted=predicted(), result={"tokens_per_second": 1e3 + n}) for n in range(count)
    ]
    curves(tmp_path, records, steps=1)
    assert written(tmp_path, records, final=True) == []
    assert len(page_of(tmp_path).rows) == 1 + count
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 1 + count
    if count == 100:
        for file in ("throughput.png", "memory.png"):
            assert len(labels(figures[file].axes[0])) == pictures.MOST_BARS
        assert len(figures["losses.png"].legends[0].get_texts()) == pictures.MOST_CURVES
        assert max(figure.get_size_inches()[1] for figure in figures.values()) < 20


def test_what_fails_is_a_line_and_the_rest_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr(pictures, "DPI", 30)
    with monkeypatch.context() as patch:
        patch.setattr(report, "csv_text", fail)
        patch.setattr(pictures, "_throughput", fail)
        lines = written(tmp_path, sweep(), final=True)
    assert lines == [
        f"warning: sweep report: no {what}: RuntimeError: no ink" for what in ("sweep.csv", "throughput.png")
    ]
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["memory.png", TIMELINE]
    before = (tmp_path / "sweep.html").read_bytes()
    monkeypatch.setattr(report, "page", fail)
    assert written(tmp_path, []) == ["warning: sweep report: no sweep.html: RuntimeError: no ink"]
    assert (tmp_path / "sweep.html").read_bytes() == before


def test_figures_have_three_digits_and_units() -> None:
    times = [0, 5e-4, 0.00995, 0.0981, 0.9994, 0.9996, 1.234, 12.34, 99.94, 151]
    expected = ["0", "0.50 ms", "9.95 ms", "98.1 ms", "999 ms", "1.00 s", "1.23 s", "12.3 s", "99.9 s", "2m31s"]
    assert [tables.seconds(value) for value in times] == expected
    assert [tables.difference(value) for value in (0.0, 1.25e-7, -3.0)] == ["0", "+1.2e-07", "-3.0e+00"]
    assert [tables.shorten(text, 6) for text in ("abcdefghij", "abcdef")] == ["ab..ij", "abcdef"]


def test_a_cell_that_ran_out_of_memory_shows_what_was_predicted(tmp_path: Path) -> None:
    written(tmp_path, [Record(0, "a", [], "out of memory", "too much", "0-a", 1, 2, predicted=predicted())])
    assert by_title(page_of(tmp_path))[0]["planned memory"] == "27.0 MiB"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that were drawn, by their file. Not rendered, which takes most of the time."""
    found: dict[str, Figure] = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: found.update({named(file.name): figure}))
    return found


def named(temporary: str) -> str:
    """`losses.png` of `.tmp-losses.png-1234abcd`."""
    return Path(temporary).name.removeprefix(".tmp-").rpartition("-")[0]


def drawn(folder: Path, records: list[Record]) -> list[pictures.SweepPicture]:
    return pictures.draw_all(folder, compare(records), lambda _: contextlib.nullcontext())


def curves(folder: Path, records: list[Record], steps: int = 20, apart: tuple[float, ...] = ()) -> None:
    """A metrics.jsonl for each cell, whose losses are apart by a thousandth of the cell's number, or `apart`."""
    for each in records:
        run, gap = folder / each.run_dir, apart[each.number] if apart else each.number / 1000
        run.mkdir(exist_ok=True)
        rows = [{"step": step, "loss": 5 / step + gap} for step in range(1, steps + 1)]
        rows.append({"step": steps, "val_loss": 5.0})
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 2')


def labels(axes) -> list[str]:
    return [text.get_text() for text in axes.get_yticklabels()]


def test_a_sweep_has_its_pictures_and_the_page_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "DPI", 30)
    curves(tmp_path, sweep()[:3])
    assert written(tmp_path, sweep(), final=True) == []
    names = ["losses.png", "memory.png", "throughput.png", TIMELINE]
    assert sorted(path.name for path in tmp_path.glob("*.png")) == names
    for name in names:
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert min(struct.unpack(">II", data[16:24])) > 30
    text = (tmp_path / "sweep.html").read_text()
    assert text.count('<img alt="') == text.count('src="data:image/png;base64,iVBOR') == 4
    assert "The sweep is running" not in text
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_pictures_show_the_figures(tmp_path: Path, figures: dict[str, Figure]) -> None:
    curves(tmp_path, sweep()[:2])
    drawn(tmp_path, sweep())
    speed, memory = figures["throughput.png"].axes
    assert labels(speed) == ["single", "ddp", "pp2", "zero3", "tp3", "tp2"]  # as in the table
    assert np.nansum([[bar.get_width() for bar in bars][:3] for bars in speed.containers[:3]], 0).tolist() == [
        *(2500, 4000, 3000)
    ]
    legends = [{text.get_text() for text in each.get_texts()} for each in figures["throughput.png"].legends]
    assert legends == [{"best", "ok", "predicted"}, {"peak", "tensors", "average", "predicted"}]
    peaks, tensors = ([bar.get_width() / MIB for bar in bars][:3] for bars in memory.containers[:2])
    assert (peaks, tensors) == ([301] * 3, [25] * 3)
    words = [text.get_text() for text in speed.texts]
    assert words[0] == "2.50k, MFU 31.2%, utilisation 88%"
    assert words[1].startswith("measured 4.00k, predicted 3.64k")  # beside the bar or the diamond
    assert words[3] == ("out of memory: rank 1: cannot allocate 134217728 bytes")
    assert speed.lines[0].get_xdata()[1] == pytest.approx(4000 * 0.1 / 0.11)  # the diamond
    (axes,) = figures["memory.png"].axes
    assert labels(axes) == [f"{name}  rank {rank}" for name in ("single", "ddp", "pp2") for rank in (0, 1)]
    widths = [[bar.get_width() / MIB for bar in bars] for bars in axes.containers[:4]]
    assert widths == [[4] * 6, [4] * 6, [8] * 6, [9, 8] * 3]
    assert [bar.get_x() / MIB for bar in axes.containers[3]] == [16] * 6
    assert [text.get_text() for text in axes.texts] == ["25.0 MiB", "24.0 MiB"] * 3
    loss, apart = figures["losses.png"].axes
    assert [line.get_label() for line in loss.lines] == ["single", "ddp"]
    assert list(loss.lines[1].get_xdata()) == list(range(1, 21))
    assert loss.lines[0].get_ydata()[4] == 1.0
    assert list(apart.lines[0].get_ydata()) == pytest.approx([0.001] * 20)
    assert isinstance(apart.yaxis.get_minor_formatter(), NullFormatter)  # matplotlib's own writes formulas
    (axes,) = figures[TIMELINE].axes
    spans = [path.get_extents() for bars in axes.collections for path in bars.get_paths()]
    assert len(spans) == 2 * 2 * 8
    assert sum(span.width for span in spans) / 2 == pytest.approx(0.05)  # seconds that a rank computes
    assert figures[TIMELINE].get_suptitle() == "Timeline: 1f1b, 2 ranks, 8 micro-batches, bubble 11.1% of the step"


def test_equal_curves_take_turns(tmp_path: Path, figures: dict[str, Figure]) -> None:
    """Two of three are equal: their dashes lie in each other's gaps."""
    cells = sweep()[:3]
    curves(tmp_path, cells, apart=(0, 1e-9, 0.3))
    drawn(tmp_path, cells)
    loss, _ = figures["losses.png"].axes
    (first, one), (second, two), (_, plain) = [line._unscaled_dash_pattern for line in loss.lines]
    assert (one, two, plain) == ((DASH, DASH), (DASH, DASH), None)
    assert (first, second) == (0, DASH)


def test_one_timeline_a_schedule(tmp_path: Path, figures: dict[str, Figure]) -> None:
    kinds = [pipeline(), pipeline(), pipeline("zbv", 2, 2), pipeline("of tomorrow"), pipeline("gpipe", 4)]
    drawn(tmp_path, [record(n, f"c{n}", result={"pipeline": each}) for n, each in enumerate(kinds)])
    titles = sorted(name for name in figures if name.startswith("timeline"))
    assert [title.split("-")[1] for title in titles] == ["1f1b", "gpipe", "zbv"]
    assert titles[-1] == "timeline-zbv-2-ranks-2-stages-per-rank-8-micro-batches.png"


def test_odd_cells_are_drawn_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "DPI", 30)
    name = "$_{x}$ \\frac 字 🙂 <b>"
    records = [
        record(0, name, predicted=predicted(), result={"step_seconds": 0.0, "loss": None}),
        record(1, "bad", status=FAILED, reason="$\\bad$" * 50, result={"memory_ranks": [], "step_seconds": None}),
        record(2, "zero", result={"tokens_per_second": 0.0, "memory_ranks": [{}, {"parameters": 0}]}),
        record(3, "nan", result={"tokens_per_second": math.nan, "step_seconds": math.inf, "comm_seconds": None}),
        Record(4, "none", [], FAILED, "", "x"),
    ]
    curves(tmp_path, records[:2])
    (tmp_path / records[2].run_dir).mkdir()
    (tmp_path / records[2].run_dir / "metrics.jsonl").write_bytes(b'\xff\xfe\n{"step": 1, "loss": NaN}\n[]\n')
    assert written(tmp_path, records, final=True) == []
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["losses.png", "memory.png", "throughput.png"]
    assert by_title(page_of(tmp_path))[3]["tok/s"] == "n/a"


def test_cells_that_never_ran_have_no_pictures(tmp_path: Path, figures: dict[str, Figure]) -> None:
    assert drawn(tmp_path, sweep()[3:]) == []
    assert figures == {}


def test_the_losses_of_cells_that_train_different_models_are_not_called_the_same(tmp_path: Path, figures: dict) -> None:
    records = [record(n, f"lr={n}", overrides=[f"optimizer.lr={n}"]) for n in (1, 2)]
    curves(tmp_path, records)
    captions = {each.file: each.caption for each in drawn(tmp_path, records)}
    assert captions["losses.png"] == "Cells that differ in optimizer.lr train different models."
    _, held_out = figures["losses.png"].axes
    assert [list(line.get_ydata()) for line in held_out.lines] == [[5.0], [5.0]]
