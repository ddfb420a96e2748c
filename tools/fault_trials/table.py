"""Compare the results of two runs: faults caught per area, then a line per fault with the tests that caught it.

python tools/faults.py table before=FILE [after=FILE] [slow=FILE] [format=text|markdown] [only=all|lost|uncaught]

slow    results of the slow tests for the faults that `after` does not catch
format  text for a terminal of 100 columns, or markdown
only    lost prints only the faults that `before` caught and `after` does not, uncaught those that no test catches
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from fault_trials.trials import CAUGHT, VERDICTS, read_records
from fault_trials.worker import LIMIT
from gptlite.errors import ConfigError

Record = dict[str, Any]
WIDTHS = (25, 33, 20, 19)  # columns of a fault's line: place, change, caught before by, caught after by


@dataclass
class Options:
    """Command-line options."""

    before: str = MISSING
    after: str | None = None
    slow: str | None = None
    format: str = "text"
    only: str = "all"


@dataclass(frozen=True)
class Row:
    """A fault with its results. `after` and `slow` are None where it has not been tried."""

    before: Record
    after: Record | None
    slow: Record | None

    @property
    def last(self) -> Record:
        """Result of the tests after the change, or before it if there is no other."""
        return self.after or self.before

    @property
    def lost(self) -> bool:
        """True if the tests before the change caught the fault, and those after it do not."""
        return is_caught(self.before) and self.after is not None and not is_caught(self.after)

    def change(self, width: int | None = None) -> str:
        """Return `old -> new`. To fit `width`, the parts that both have in common are shortened."""
        old, new = self.before["old"], self.before["new"]
        if width is None or len(old) + len(new) + 4 <= width:
            return f"{old} -> {new}"
        start = _common(old, new)
        end = _common(old[start:][::-1], new[start:][::-1])
        room = max(0, width - 4 - (len(old) + len(new) - 2 * start - 2 * end)) // 2  # for what both have in common
        before, after = max(0, start - room // 2), end - (room - room // 2)
        return _cut(f"{old[before : len(old) - max(0, after)]} -> {new[before : len(new) - max(0, after)]}", width)

    def by_after(self) -> str:
        """Return the test that catches the fault after the change."""
        if self.slow is not None and is_caught(self.slow) and not is_caught(self.last):
            return f"slow: {caught_by(self.slow)}"
        return caught_by(self.after) if self.after else "not tried"


def run(options: Options) -> int:
    """Print the table. Raises ConfigError."""
    for key, allowed in (("format", ("text", "markdown")), ("only", ("all", "lost", "uncaught"))):
        if getattr(options, key) not in allowed:
            raise ConfigError(f"{key}={getattr(options, key)} is not one of {', '.join(allowed)}")
    before, after, slow = (_read(key, getattr(options, key)) for key in ("before", "after", "slow"))
    rows = [Row(record, after.get(name), slow.get(name)) for name, record in before.items()]
    rows.sort(key=lambda row: (row.before["area"], row.before["file"], row.before["line"]))
    shown = [row for row in rows if options.only == "all" or (row.lost if options.only == "lost" else _open(row))]
    two = options.after is not None
    lines = markdown(rows, shown, two) if options.format == "markdown" else text(rows, shown, two)
    print("\n".join(lines))
    return 0


def text(rows: list[Row], shown: list[Row], two: bool) -> Iterable[str]:
    """Yield the lines for a terminal."""
    head, *counts = areas(rows, two)
    for cells in (head, *counts):
        yield f"{cells[0]:<16}" + "".join(f"{cell:>14}" for cell in cells[1:])
    area = None
    for row in shown:
        if row.before["area"] != area:
            area = row.before["area"]
            yield f"\n{area}"
        place = f"{row.before['file'].removeprefix('gptlite/')}:{row.before['line']}"
        names = [caught_by(row.before), row.by_after() if two else ""]
        cells = [_cut(place, WIDTHS[0], front=False), row.change(WIDTHS[1])]
        cells += [_cut(_title(name), width) for name, width in zip(names, WIDTHS[2:], strict=True)]
        yield " ".join(f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def markdown(rows: list[Row], shown: list[Row], two: bool) -> Iterable[str]:
    """Yield the lines of a Markdown document."""
    head, *counts = areas(rows, two)
    yield from (_cells(head), "|---" + "|--:" * (len(head) - 1) + "|", *map(_cells, counts), "")
    titles = [
        "area",
        "place",
        "change",
        "caught before by" if two else "caught by",
        *(["caught after by"] if two else []),
    ]
    yield from (_cells(titles), "|---" * len(titles) + "|")
    for row in shown:
        place = f"{row.before['file']}:{row.before['line']}"
        code = row.change().replace("|", "\\|").replace("`", "'")
        yield _cells(
            [row.before["area"], place, f"`{code}`", caught_by(row.before), *([row.by_after()] if two else [])]
        )


def areas(rows: list[Row], two: bool) -> list[list[str]]:
    """Return the title, a row of counts for each area, and the sums."""
    titles = ["area", "faults", *(["caught before", "caught after", "lost", "with slow"] if two else ["caught"])]
    lines = [titles]
    for area in [*dict.fromkeys(row.before["area"] for row in rows), "all"]:
        inside = [row for row in rows if area in (row.before["area"], "all")]
        counts = [len(inside), sum(is_caught(row.before) for row in inside)]
        if two:
            after = [row.after is not None and is_caught(row.after) for row in inside]
            slow = [row.slow is not None and is_caught(row.slow) for row in inside]
            either = sum(a or b for a, b in zip(after, slow, strict=True))
            counts += [sum(after), sum(row.lost for row in inside), either]
        lines.append([area, *map(str, counts)])
    return lines


def is_caught(record: Record) -> bool:
    """Return True if a test caught the fault."""
    return record["verdict"] in (CAUGHT, LIMIT)


def caught_by(record: Record) -> str:
    """Return the test that caught a fault, or the verdict."""
    if not is_caught(record):
        return f"{record['verdict']}, {record['left']} tests left" if record["left"] else record["verdict"]
    return record["by"] + (" (time limit)" if record["verdict"] == LIMIT else "")


def _open(row: Row) -> bool:
    return not is_caught(row.last) and not (row.slow and is_caught(row.slow))


def _read(key: str, file: str | None) -> dict[str, Record]:
    if file is None:
        return {}
    if not Path(file).is_file():
        raise ConfigError(f"{key}={file} does not exist")
    return {record["id"]: record for record in read_records(Path(file)) if record["verdict"] in VERDICTS}


def _common(one: str, other: str) -> int:
    """Return the number of equal characters at the front."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _title(name: str) -> str:
    """Return the name of a test's function without `test_`, of a file without its folder."""
    mark = "slow: " if name.startswith("slow: ") else ""
    return mark + name.removeprefix(mark).partition("[")[0].rpartition("::")[2].rpartition("/")[2].removeprefix("test_")


def _cut(text: str, width: int, front: bool = True) -> str:
    """Shorten a text to a width, keeping its front or its end."""
    if len(text) <= width:
        return text
    return f"{text[: width - 2]}.." if front else f"..{text[2 - width :]}"


def _cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
