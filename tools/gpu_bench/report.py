"""The report of a run: Markdown, JSON and pictures in one folder. What a part has found is written at once."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

PARTS = ("gates", "ceilings", "kernels", "steps", "profile", "peer", "model")
TITLES = {
    "gates": "Gates: is it right",
    "ceilings": "Ceilings of this device",
    "kernels": "Kernels alone",
    "steps": "Training steps",
    "profile": "A profiled step",
    "peer": "Beside nanoGPT",
    "model": "Launch and byte model of a step",
}


class Deadline:
    """The time a part has; `left` is in seconds."""

    def __init__(self, minutes: float) -> None:
        self.seconds = 60 * minutes
        self._end = time.monotonic() + self.seconds

    @property
    def left(self) -> float:
        """Seconds, 0 when the time is over."""
        return max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether there is none left."""
        return self.left == 0.0


class Part:
    """One part's section: text, tables, pictures, and numbers for the JSON. Each addition is flushed to disk."""

    def __init__(self, folder: Path, name: str, deadline: Deadline, log: Callable[[str], None] = print) -> None:
        self.folder, self.name, self.deadline, self._log = folder, name, deadline, log
        self.failures: list[str] = []
        self.data: dict[str, Any] = {"part": name, "failures": self.failures}
        self._blocks: list[str] = []
        self._started = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)

    def progress(self, done: int, total: int, what: str) -> None:
        """One line with how far the part is and when it will be over."""
        spent = time.monotonic() - self._started
        eta = f"{spent * (total - done) / done:.0f} s" if done else "unknown"
        self._log(f"{self.name}: {done}/{total}, {what}; {spent:.0f} s so far, ETA {eta}")

    def text(self, line: str) -> None:
        """A paragraph, printed too."""
        self._log(line)
        self._add(line)

    def table(self, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table, printed too."""
        lines = markdown_table(head, rows)
        self._log(lines)
        self._add(lines)

    def replace_table(self, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """The last table again, with more rows; not printed."""
        self._blocks[-1:] = [markdown_table(head, rows)]
        self.flush()

    def reprint(self) -> None:
        """Prints the last table."""
        self._log(self._blocks[-1])

    def picture(self, file: Path, alt: str) -> None:
        """A picture in the folder."""
        self._add(f"![{alt}]({file.name})")

    def failed(self, what: str) -> None:
        """Records a failure: the exit code will be 1."""
        self.failures.append(what)
        self._log(f"{self.name}: FAILED: {what}")
        self._add(f"**Failed:** {what}")

    def put(self, key: str, value: Any) -> None:
        """A value of the JSON."""
        self.data[key] = value
        self.flush()

    def record(self, what: str) -> None:
        """A failure that a table's row shows."""
        self.failures.append(what)
        self._log(f"{self.name}: FAILED: {what}")
        self.flush()

    def _add(self, block: str) -> None:
        self._blocks.append(block)
        self.flush()

    def flush(self) -> None:
        """Writes NAME.json and NAME.md."""
        self.data["seconds"] = round(time.monotonic() - self._started, 1)
        _write(self.folder / f"{self.name}.json", json.dumps(self.data, indent=1))
        _write(self.folder / f"{self.name}.md", "\n\n".join([f"## {TITLES[self.name]}", *self._blocks]) + "\n")


def assemble(folder: Path, words: str = "") -> Path:
    """Joins what the parts have written into report.md and report.json. Returns the first."""
    sections = [folder / f"{name}.md" for name in PARTS if (folder / f"{name}.md").exists()]
    found = {name: folder / f"{name}.json" for name in PARTS if (folder / f"{name}.json").exists()}
    data = {name: json.loads(file.read_text()) for name, file in found.items()}
    failures = [f"- {name}: {each}" for name, its in data.items() for each in its["failures"]]
    head = [
        "# GPU report",
        *([words] if words else []),
        "Failures:\n" + "\n".join(failures) if failures else "No failures.",
    ]
    report = folder / "report.md"
    _write(report, "\n\n".join([*head, *(section.read_text().rstrip() for section in sections)]) + "\n")
    _write(folder / "report.json", json.dumps(data, indent=1))
    return report


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their longest cell, numbers to the right."""
    cells = [[str(cell).replace("|", "/") for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(head, *cells, strict=True)]
    right = [bool(cells) and all(_is_number(row[i]) for row in cells) for i in range(len(head))]
    rule = "|".join("-" * (width + 1) + (":" if end else "-") for width, end in zip(widths, right, strict=True))

    def line(row: Sequence[str]) -> str:
        each = (c.rjust(w) if end else c.ljust(w) for c, w, end in zip(row, widths, right, strict=True))
        return f"| {' | '.join(each)} |"

    return "\n".join([line(head), f"|{rule}|", *map(line, cells)])


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() or cell in ("-", "") or (cell[:1] in "+-" and cell[1:2].isdigit())


def _write(file: Path, text: str) -> None:
    unfinished = file.with_suffix(file.suffix + ".part")
    unfinished.write_text(text)
    os.replace(unfinished, file)
