"""The file with a row for each configuration that has been run, in the columns of docs/parallelism_matrix.csv."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from gptlite.files import write_whole
from gptlite.satellites.certify.fuzz.oracle import Judgement

COLUMNS = (
    *("layout", "loss", "gradient norm", "worst gradient", "worst gradient's tensor"),
    *("worst value", "worst value's tensor", "verdict"),
)


class Layouts:
    """Rows by name. Rows of an earlier run in the same file are kept if they are ok, and not run again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept: set[str] = set()
        rows: list[list[str]] = []
        if path.exists():
            with open(path, newline="", encoding="utf-8") as file:
                rows = [row for row in csv.reader(file) if row[-1:] == ["ok"]]
            self.kept = {row[0] for row in rows}
        write_whole(path, "".join(map(line, [list(COLUMNS), *rows])))

    def add(self, name: str, outcome: Judgement) -> None:
        """Append a row."""
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            file.write(line(row(name, outcome)))


def row(name: str, outcome: Judgement) -> list[str]:
    """Return a layout's row, such as `layout, 1e-07, 2e-07, 3e-06, layers.6.mlp.up.bias, ..., ok`."""
    verdict = "ok" if outcome.ok else outcome.message
    if not outcome.errors:
        return [name, *[""] * 6, verdict]
    errors = outcome.errors
    numbers = [f"{errors[key]:.0e}" for key in ("loss", "grad_norm")]
    tensors = [text for error, tensor in (errors["gradient"], errors["value"]) for text in (f"{error:.0e}", tensor)]
    return [name, *numbers, *tensors, verdict]


def line(values: list[str]) -> str:
    """Return a line of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()
