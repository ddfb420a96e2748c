"""Lines on long work, and none on short."""

from threading import Event

import pytest

from gptlite import progress
from gptlite.progress import Console, Progress


@pytest.fixture
def clock(monkeypatch):
    """Seconds, moved by hand."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("total", "line"),
    [
        (4_000_000_000, "loading: 1.00 of 4.00 GB (25%), 100 MB/s, ETA 30s"),
        (400_000_000, "loading: 100.00 of 400.00 MB (25%), 10 MB/s, ETA 30s"),
    ],
)
def test_long_work_shows_what_is_left(clock, total, line):
    lines: list[str] = []
    progress = Progress("loading", total, lines.append)
    clock[0] = 10
    progress.add(total // 4)
    progress.add(total // 4)
    assert lines == [line]


def test_short_work_is_silent(clock):
    lines: list[str] = []
    progress = Progress("loading", 4, lines.append)
    clock[0] = 4.9
    progress.add(4)
    assert lines == []


def test_more_than_was_announced_does_no_harm(clock):
    lines: list[str] = []
    progress = Progress("loading", 0, lines.append)
    clock[0] = 10
    progress.add(0)
    progress.add(5_000_000)
    (line,) = lines
    assert line.endswith("ETA 0s")


def test_work_of_unknown_amount_tells_how_long_it_takes():
    lines: list[str] = []
    told = Event()

    def log(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            told.set()

    with progress.working("starting", log, patience=0.01, interval=0.01):
        assert told.wait(10)
    assert lines[0] == "starting: 0s so far"
    count = len(lines)
    with progress.working("quick", log):
        pass
    assert len(lines) == count


LINES = ["begin", "step 1/9  loss 1  ETA 1m10s", "step 2/9  ETA 9s", "eval 2/9", "loading: 1%, ETA 30s", "end"]


def test_a_notebook_has_one_updating_line(monkeypatch, capsys):
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    console = Console()
    for line in LINES:
        console.print(line)
    one, two = LINES[1], LINES[2].ljust(len(LINES[1]))
    assert capsys.readouterr().out == f"begin\n{one}\r{two}\neval 2/9\n{LINES[4]}\nend\n"


def test_elsewhere_every_line_stays(capsys):
    console = Console()
    for line in LINES:
        console.print(line)
    assert capsys.readouterr().out.splitlines() == LINES
