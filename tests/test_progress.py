"""Lines on long work, and none on short."""

import pytest

from gptlite import progress
from gptlite.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """Seconds, moved by hand."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("total", "line"),
    [
        (4_000_000_000, "loading: 1.00 of 4.00 GB (25%), 100 MB/s, ETA 0:00:30"),
        (400_000_000, "loading: 100.00 of 400.00 MB (25%), 10 MB/s, ETA 0:00:30"),
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
    assert line.endswith("ETA 0:00:00")
