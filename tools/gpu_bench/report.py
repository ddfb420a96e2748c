"""Report of a benchmark: Markdown, JSON and charts in one folder. The results of a part are written as they arrive."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gptlite.files import write_whole
from gptlite.progress import format_duration

TITLES = {
    "gates": "Gates: correctness",
    "ceilings": "Ceilings of this device",
    "kernels": "Single kernels",
    "steps": "Training steps",
    "profile": "A profiled step",
    "peer": "Comparison with nanoGPT",
    "model": "Launch and byte model of a step",
    "compare": "Implementations of a step compared",
    "graph": "Steps in a CUDA graph",
    "fp8": "Steps in fp8",
}


class Part:
    """Section of one part: text, tables, charts and numbers for the JSON. It also holds the part's time limit."""

    def __init__(self, folder: Path, name: str, minutes: float, log: Callable[[str], None] = print) -> None:
        self.folder, self.name, self.log, self.seconds = folder, name, log, 60 * minutes
        self.failures: list[str] = []
        self.data: dict[str, Any] = {"part": name, "failures": self.failures}
        self._blocks: list[Callable[[], str]] = []
        self._started = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def spent(self) -> float:
        """Seconds since the part began."""
        return time.monotonic() - self._started

    @property
    def over(self) -> bool:
        """True if no time is left."""
        return self.spent >= self.seconds

    def progress(self, done: int, total: int, what: str) -> None:
        """Log a line with the part's progress and ETA."""
        eta = format_duration(self.spent * (total - done) / done) if done else "n/a"
        self.log(f"{self.name}: {done}/{total}, {what}; {format_duration(self.spent)} so far, ETA {eta}")

    def text(self, line: str) -> None:
        """Add a paragraph, and print it."""
        self.log(line)
        self._add(lambda: line)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add a table, and print it unless it is empty. Rows appended to `rows` later appear at the next update."""
        if rows:
            self.log(markdown_table(head, rows))
        self._add(lambda: markdown_table(head, rows))

    def picture(self, file: Path, alt: str) -> None:
        """Add a picture from the folder."""
        self._add(lambda: f"![{alt}]({file.name})")

    def failed(self, what: str) -> None:
        """Record a failure: the exit code will be 1."""
        self.failures.append(what)
        self.log(f"{self.name}: FAILED: {what}")
        self._add(lambda: f"**Failed:** {what}")

    def put(self, key: str, value: Any) -> None:
        """Set a value of the JSON, and write the files."""
        self.data[key] = value
        self.flush()

    def flush(self) -> None:
        """Write the files of the part: NAME.md, then NAME.json."""
        self.data["seconds"] = round(self.spent, 1)
        text = "\n\n".join([f"## {TITLES[self.name]}", *(block() for block in self._blocks)])
        write_whole(self.folder / f"{self.name}.md", text + "\n")
        write_whole(self.folder / f"{self.name}.json", json.dumps(self.data, indent=1))

    def _add(self, block: Callable[[], str]) -> None:
        self._blocks.append(block)
        self.flush()


def add_failure(folder: Path, name: str, failure: str) -> None:
    """Add a failure to the result files of a part, once its process has ended."""
    file, section = folder / f"{name}.json", folder / f"{name}.md"
    if not file.exists():
        Part(folder, name, 0).failed(failure)
        return
    data = json.loads(file.read_text())
    data["failures"].append(failure)
    write_whole(section, section.read_text() + f"\n**Failed:** {failure}\n")
    write_whole(file, json.dumps(data, indent=1))
    print(f"{name}: FAILED: {failure}", flush=True)


def assemble(folder: Path, lead: str) -> Path:
    """Join the files of all parts into report.md and report.json. Returns the path of report.md."""
    files = {name: folder / f"{name}.json" for name in TITLES}
    data = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    failures = [f"- {name}: {each}" for name, section in data.items() for each in section["failures"]]
    head = ["# GPU report", lead, "Failures:\n" + "\n".join(failures) if failures else "No failures."]
    sections = [(folder / f"{name}.md").read_text().rstrip() for name in data]
    report = folder / "report.md"
    write_whole(report, "\n\n".join([*head, *sections]) + "\n")
    write_whole(folder / "report.json", json.dumps(data, indent=1))
    return report


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table. Columns are as wide as their longest cell, and numbers are right-aligned."""
    cells = [[str(cell).replace("|", "/") for cell in row] for row in rows]
    columns = list(zip(head, *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [bool(cells) and all(map(_is_number, column[1:])) for column in columns]
    rule = "|".join("-" * (width + 1) + (":" if end else "-") for width, end in zip(widths, right, strict=True))

    def line(row: Sequence[str]) -> str:
        each = (c.rjust(w) if end else c.ljust(w) for c, w, end in zip(row, widths, right, strict=True))
        return f"| {' | '.join(each)} |"

    return "\n".join([line(head), f"|{rule}|", *map(line, cells)])


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() or cell in ("-", "") or (cell[:1] in "+-" and cell[1:2].isdigit())
