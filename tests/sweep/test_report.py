"""What a sweep leaves for a person: the table, sweep.csv, sweep.html. Whatever its cells are, none of it fails."""

import csv
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gptlite.invocation import command
from gptlite.sweep import report, report_html, report_pictures
from gptlite.sweep.record import FAILED, PRUNED, Record
from gptlite.sweep.report import csv_text, table, write_reports
from gptlite.sweep.report_rows import rows_of
from gptlite.sweep.report_table import difference, planned, seconds, shorten
from sweep.report_records import MIB, predicted, record, sweep

NASTY = """</td><script src="http://evil/x.js">alert('1')</script>&amp;<img src='//evil/y.png'> "quoted" $x$"""


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
            self.rows[-1][-1] += data + " "


def page_of(folder: Path) -> Page:
    return Page((folder / "sweep.html").read_text(encoding="utf-8"))


def written(folder: Path, records: list[Record], final: bool = False) -> list[str]:
    """Writes the reports and returns what was logged."""
    lines: list[str] = []
    write_reports(folder, records, lines.append, final=final)
    return lines


def test_the_table():
    lines = table(sweep(), width=1000, bold=False).splitlines()
    assert lines[0].startswith("== sweep: 6 cells: 3 ok, 1 out of memory, 1 pruned, 1 failed ===")
    assert lines[1].split()[:4] == ["cell", "status", "layout", "ranks"]
    assert re.split(r"\s{2,}", lines[2].strip()) == [
        *("single", "ok", "one rank", "1", "2.50k", "2.50k", "31.2%", "301 MiB", "201 MiB", "88%", "300 MiB, 301 MiB"),
        *("100 ms", "100 ms", "0", "0", "5.0000", "n/a", "0", "n/a", "n/a", "12s", "0-single"),
    ]
    assert re.split(r"\s{2,}", lines[3].strip()) == [
        *(
            "*ddp",
            "ok",
            "data 2 (zero 0)",
            "2",
            "4.00k",
            "2.00k",
            "n/a",
            "301 MiB",
            "201 MiB",
            "88%",
            "300 MiB, 301 MiB",
        ),
        *(
            "100 ms",
            "70.0 ms",
            "30.0 ms",
            "0",
            "5.0000",
            "n/a",
            "+2.0e-07",
            "110 ms +10%",
            "27.0 MiB +8%",
            "12s",
            "1-ddp",
        ),
    ]
    assert re.split(r"\s{2,}", lines[4].strip())[11:15] == ["100 ms", "50.0 ms", "43.8 ms", "6.25 ms"]
    assert set(lines[6].split()[2:-1]) == {"-"}
    text = "\n".join(lines)
    assert "zero3: out of memory: rank 1: cannot allocate 134217728 bytes" in text
    assert "tp3: pruned: model.num_heads=4 is not divisible by 3" in text
    assert "best  ddp: 4.00k tokens/s, 1.60 times single's" in text
    assert f"run   {command('train')} parallelism=ddp" in text
    assert text.isascii()
    assert "\033" not in text


def test_only_the_best_is_bold():
    lines = table(sweep(), width=1000, bold=True).splitlines()
    assert [line.split()[0] for line in lines if "\033[1m" in line] == ["\033[1m*ddp", "best"]
    assert all(line.count("\033[1m") == line.count("\033[0m") for line in lines)
    assert "\033" not in table([sweep()[4]], bold=True)


@pytest.mark.parametrize("width", [80, 100, 140, 160])
def test_the_table_fits_the_terminal(width: int):
    lines = table(sweep(), width=width, bold=False).splitlines()
    assert max(map(len, lines)) <= width
    assert "columns more in sweep.csv and sweep.html" in lines[-2]
    assert {"cell", "status", "tok/s", "loss", "step"} <= set(lines[1].split())


def test_a_file_gets_every_column(capsys: pytest.CaptureFixture[str]):
    print(table(sweep()))
    out = capsys.readouterr().out
    assert "run folder" in out
    assert "columns more" not in out
    assert "\033" not in out


def test_the_csv_has_every_figure():
    rows = list(csv.DictReader(io.StringIO(csv_text(rows_of(sweep())))))
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "out of memory", "pruned", "failed"]
    ddp = rows[1]
    assert (ddp["best"], ddp["baseline"], rows[0]["baseline"]) == ("1", "0", "1")
    assert float(ddp["tokens_per_second_per_rank"]) == 2000
    assert ddp["memory_peak_bytes_of_each_rank"] == f"{300 * MIB} {301 * MIB}"
    assert int(ddp["memory_tensor_bytes"]) == 25 * MIB
    assert int(ddp["memory_activations_bytes"]) == 9 * MIB
    assert float(rows[2]["bubble_seconds"]) == pytest.approx(0.00625)
    assert float(ddp["predicted_step_seconds"]) == 0.11
    assert rows[4]["tokens_per_second"] == rows[4]["mfu"] == rows[4]["predicted_step_seconds"] == ""
    assert rows[4]["reason"] == "model.num_heads=4 is not divisible by 3"
    assert csv_text([]) == "number\n"


def test_the_page_has_every_cell_and_needs_no_network(tmp_path: Path):
    assert written(tmp_path, sweep()) == []
    page = page_of(tmp_path)
    head, *cells = page.rows
    assert [words[0].split()[0] for words in cells] == ["single", "ddp", "pp2", "zero3", "tp3", "tp2"]
    assert len(head) == len(cells[0]) == 12
    ddp = " ".join(cells[1])
    for words in ("4.00k", "2.00k", "301 MiB", "300 MiB · 301 MiB", "70.0 + 30.0 + 0 ms", "110 ms +10%", "1-ddp"):
        assert words in ddp
    assert "+2.0e-07" in cells[1][6]
    assert "baseline" in cells[0][6]
    assert cells[2][5].split() == ["100", "ms", "50.0", "+", "43.8", "+", "6.3", "ms"]
    assert cells[5][1].split() == ["failed", *"RuntimeError: rank 1 <has> crashed & burned".split()]
    text = (tmp_path / "sweep.html").read_text(encoding="utf-8")
    assert "<tr class='best'><th scope='row'>ddp" in text
    assert "goes on" in text
    assert "script" not in page.tags
    assert_offline(text, page)


def assert_offline(text: str, page: Page) -> None:
    assert all(not re.match(r"(?!data:)[a-z+.-]+:|//", link, re.I) for link in page.links), page.links
    style = text[text.index("<style>") : text.index("</style>")]
    assert "@import" not in style
    assert "url(" not in style
    assert not re.search(r"""(src|href|srcset)\s*=\s*['"]?\s*https?:""", text, re.I)


def test_names_and_reasons_are_words_and_never_markup(tmp_path: Path):
    nasty = [
        record(0, NASTY, layout=NASTY, overrides=[NASTY], run_dir=NASTY),
        record(1, "b", status=FAILED, reason=NASTY),
    ]
    nasty.append(Record(2, NASTY, [NASTY], PRUNED, NASTY, f"http://evil/{NASTY}"))
    written(tmp_path, nasty)
    page = page_of(tmp_path)
    assert not {"script", "img"} & set(page.tags)
    assert len(page.rows) == 4
    assert all("script" in "".join(words) for words in page.rows[1:])
    assert_offline((tmp_path / "sweep.html").read_text(), page)
    lines = table(nasty, width=100).splitlines()
    assert max(map(len, lines[1:5])) <= 100


@pytest.mark.parametrize("count", [0, 1, 100])
def test_any_number_of_cells(tmp_path: Path, count: int):
    records = [record(n, f"cell{n}", result={"tokens_per_second": 1000.0 + n}) for n in range(count)]
    assert written(tmp_path, records) == []
    page = page_of(tmp_path)
    assert len(page.rows) == 1 + max(1, count)
    assert len(list(csv.DictReader((tmp_path / "sweep.csv").open()))) == count
    text = table(records)
    assert text.count("\n") >= count
    assert (f"best  cell{count - 1}:" in text) == bool(count)


def test_long_names_and_reasons_stay_in_bounds(tmp_path: Path):
    long = [record(0, "n" * 3000, status=FAILED, reason="line\n" * 9000, layout="l" * 500), record(1, "ok")]
    assert written(tmp_path, long) == []
    lines = table(long, width=100).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) < 20
    assert "line line" in "".join(page_of(tmp_path).rows[1])
    assert (tmp_path / "sweep.html").stat().st_size < 40_000


def test_what_fails_is_a_line_and_the_rest_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise RuntimeError("no ink")

    with monkeypatch.context() as patch:
        patch.setattr(report, "csv_text", fail)
        patch.setattr(report_pictures, "draw_all", fail)
        lines = written(tmp_path, sweep(), final=True)
    assert lines == [f"warning: sweep report: no {what}: RuntimeError: no ink" for what in ("sweep.csv", "pictures")]
    assert len(page_of(tmp_path).rows) == 7
    before = (tmp_path / "sweep.html").read_bytes()
    monkeypatch.setattr(report_html, "page", fail)
    assert written(tmp_path, sweep()) == ["warning: sweep report: no sweep.html: RuntimeError: no ink"]
    assert (tmp_path / "sweep.html").read_bytes() == before
    assert written(tmp_path / "gone", sweep())[0].startswith("warning: sweep report: no sweep.csv: FileNotFoundError")


def test_words_for_figures():
    times = [0, 5e-4, 0.00995, 0.0981, 0.9994, 0.9996, 1.234, 12.34, 99.94, 151]
    expected = ["0", "0.50 ms", "9.95 ms", "98.1 ms", "999 ms", "1.00 s", "1.23 s", "12.3 s", "99.9 s", "2m31s"]
    assert [seconds(value) for value in times] == expected
    assert planned(0.11, 0.1, seconds) == "110 ms +10%"
    assert planned(0.11, None, seconds) == planned(0.11, 0.0, seconds) == "110 ms"
    assert planned(None, 0.1, seconds) is None
    assert [difference(value) for value in (0.0, 1.25e-7, -3.0)] == ["0", "+1.2e-07", "-3.0e+00"]
    assert shorten("abcdefghij", 6) == "ab..ij"
    assert shorten("abcdef", 6) == "abcdef"


def test_a_cell_that_ran_out_of_memory_shows_what_was_predicted(tmp_path: Path):
    short = Record(0, "a", [], "out of memory", "too much", "0-a", 1, 2, predicted=predicted())
    written(tmp_path, [short])
    assert "27.0 MiB" in page_of(tmp_path).rows[1][9]
