"""Regenerate docs/parallelism_matrix.csv, with the errors of each layout, and the tables of docs/parallelism_checks.md.

python tools/parallelism_table.py [results=FILE] [output=docs/parallelism_checks.md]
    [matrix=docs/parallelism_matrix.csv] [only_missing=false]
python tools/parallelism_table.py fuzz=fuzz/layouts.csv [output=...] [matrix=...]

Runs every cell of the parity matrix (tests/distributed/cells/matrix.py) on gloo processes, which takes about forty
minutes on two idle cores. The tables give the largest errors of each precision, and the refused configurations.
`results` is a JSON file to which the result of each cell is added. With only_missing=true, cells in this file are not
run again. With `fuzz`, no cell is run: the rows that `gptlite certify fuzz` has written follow those of the matrix, in
the place of former ones, and the table of the fuzz is written. Exit codes: 0 if all rows agree with one process,
otherwise 1.
"""

import csv
import io
import json
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptlite.config.command_line import run_tool
from gptlite.errors import ConfigError
from gptlite.files import write_whole

ROOT = Path(__file__).resolve().parents[1]
if TYPE_CHECKING:
    from distributed.cells.layouts import Cell  # pyright: ignore[reportMissingImports]

Row = dict[str, str]  # of the CSV file, by column
Result = dict[str, Any]  # a cell's verdict, largest errors, and the tensors with these errors, as JSON
COLUMNS = (
    *("layout", "loss", "gradient norm", "worst gradient", "worst gradient's tensor"),
    *("worst value", "worst value's tensor", "verdict"),
)
NUMBERS = "loss", "gradient norm", "worst gradient", "worst value"
ERRORS = "| precision | layouts | loss | gradient norm | gradients | values |\n|---|--:|--:|--:|--:|--:|"
REFUSALS = "| overrides | message, without the values that it proposes |\n|---|---|"


@dataclass
class Arguments:
    """Command-line arguments."""

    results: str | None = None
    output: str = "docs/parallelism_checks.md"
    matrix: str = "docs/parallelism_matrix.csv"
    only_missing: bool = False
    fuzz: str | None = None


def main(arguments: Arguments) -> int:
    """Run the cells, write the tables, and return the exit code."""
    if not (ROOT / "tests" / "distributed").is_dir():
        raise ConfigError("the matrix is in tests/distributed, which an installed package lacks; use a checkout")
    sys.path.insert(0, str(ROOT / "tests"))
    from distributed.cells.compare import STATED  # pyright: ignore[reportMissingImports]
    from distributed.cells.layouts import REFUSED  # pyright: ignore[reportMissingImports]
    from distributed.cells.matrix import CELLS  # pyright: ignore[reportMissingImports]

    names = {cell.id for cell in CELLS}
    if arguments.fuzz:
        return add_fuzz(arguments, names, ("fp32", *STATED))
    file = Path(arguments.results) if arguments.results else None
    known: dict[str, Result] = json.loads(file.read_text()) if file and file.exists() else {}
    if not arguments.only_missing:
        known = {}
    run([cell for cell in CELLS if cell.id not in known], known, file)
    results = {name: [known[cell.id] for cell in CELLS if cell.precision == name] for name in ("fp32", *STATED)}
    same, (loss, norm, gradient, value) = sum(known[cell.id]["same"] for cell in CELLS), worst(results["fp32"])
    lead = (
        f"{same} of {len(CELLS)} layouts agree with one process. Largest errors in fp32: loss {loss:.0e}, "
        f"gradient norm {norm:.0e}, gradients {gradient:.0e}, values {value:.0e}."
    )
    refusals = [f"| `{each.overrides}`{world(each.world)} | {each.cause()} |" for each in REFUSED]
    tables = {
        "cells": [lead, "", ERRORS, *(errors_row(name, found) for name, found in results.items())],
        "bounds": [ERRORS, *(errors_row(name, results[name], limits) for name, limits in STATED.items())],
        "refused": [REFUSALS, *refusals],
    }
    output = Path(arguments.output)
    text = output.read_text(encoding="utf-8")
    for name, lines in tables.items():
        text = replaced(text, name, "\n".join(lines))
    write_whole(output, text)
    drawn = [row for row in read_rows(Path(arguments.matrix)) if row["layout"] not in names]
    own = [dict(zip(COLUMNS, matrix_row(cell.id, known[cell.id]), strict=True)) for cell in CELLS]
    write_whole(Path(arguments.matrix), matrix_text([*own, *drawn]))
    print(f"wrote {arguments.output} and {arguments.matrix}: {same} of {len(CELLS)} layouts agree with one process")
    return 0 if same == len(CELLS) else 1


def run(cells: "list[Cell]", known: dict[str, Result], file: Path | None) -> None:
    """Run the cells, largest first. Adds each result to `known`, and writes `known` to `file` after each cell."""
    from distributed.cells.compare import Pool, References, judge  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory(prefix="gptlite-parity-") as folder:
        pool = Pool(References(Path(folder)))
        try:
            for number, cell in enumerate(sorted(cells, key=lambda cell: -cell.world)):
                try:
                    result = pool.run(cell, timeout=600)
                    known[cell.id] = summary(result, *judge(pool.references, cell, result))
                except (RuntimeError, TimeoutError) as error:
                    known[cell.id] = {"same": False, "words": str(error).strip().splitlines()[-1], "seconds": 0.0}
                words = "ok" if known[cell.id]["same"] else known[cell.id]["words"]
                print(f"{number + 1}/{len(cells)} {cell.id}: {words} ({known[cell.id]['seconds']:.1f} s)", flush=True)
                if file:
                    write_whole(file, json.dumps(known, indent=1) + "\n")
        finally:
            pool.close()


def summary(result: Any, same: bool, verdict: str) -> Result:
    """Return the largest error of each kind over all steps, with the tensor's name for gradients and values."""
    distances = [each.distances for each in result.comparisons]
    return {
        "same": same,
        "words": verdict.splitlines()[0],
        "seconds": result.seconds,
        "loss": max(each.loss for each in distances),
        "grad_norm": max(each.grad_norm for each in distances),
        "gradient": largest([each.gradients for each in distances]),
        "value": largest([each.values for each in distances]),
    }


def largest(steps: list[dict[str, float]]) -> tuple[float, str]:
    """Return the largest error over all steps, and the name of its tensor. NaN is the largest error."""
    pairs = [(error, name) for errors in steps for name, error in errors.items()]
    return max(pairs, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])


def worst(results: list[Result]) -> list[float]:
    """Return the largest errors of losses, gradient norms, gradients and values, without cells that failed to run."""
    ran = [each for each in results if "loss" in each]
    numbers = [[each["loss"], each["grad_norm"], each["gradient"][0], each["value"][0]] for each in ran]
    return [max(column) for column in zip(*numbers, strict=True)]


def add_fuzz(arguments: Arguments, cells: set[str], precisions: tuple[str, ...]) -> int:
    """Put the rows of a fuzz after those of the `cells`, write its table, and return the exit code."""
    matrix, output = Path(arguments.matrix), Path(arguments.output)
    drawn = [row for row in read_rows(Path(str(arguments.fuzz))) if row["layout"] not in cells]
    if not drawn:
        raise ConfigError(f"fuzz={arguments.fuzz}: the file has no rows; run gptlite certify fuzz first")
    own = [row for row in read_rows(matrix) if row["layout"] in cells]
    write_whole(output, replaced(output.read_text(encoding="utf-8"), "fuzz", "\n".join(fuzz_lines(drawn, precisions))))
    write_whole(matrix, matrix_text([*own, *drawn]))
    same = sum(row["verdict"] == "ok" for row in drawn)
    print(f"wrote {output} and {matrix}: {same} of {len(drawn)} configurations of the fuzz agree with one process")
    return 0 if same == len(drawn) else 1


def fuzz_lines(drawn: list[Row], precisions: tuple[str, ...]) -> list[str]:
    """Return the table of a fuzz: the largest errors of each precision."""
    lines = [f"{sum(row['verdict'] == 'ok' for row in drawn):,} of {len(drawn):,} configurations agree.", "", ERRORS]
    for name in precisions:
        rows = [row for row in drawn if name in row["layout"].split("-") and row["loss"]]
        if rows:
            errors = [f"{max(float(row[column]) for row in rows):.0e}" for column in NUMBERS]
            lines.append(f"| {name} | {len(rows)} | {' | '.join(errors)} |")
    return lines


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a CSV file with COLUMNS."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def matrix_text(rows: list[Row]) -> str:
    """Return the CSV text: COLUMNS, then a row per layout. A layout that failed to run has only a verdict."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def matrix_row(name: str, result: Result) -> list[str]:
    """Return a layout's row, such as `layout, 1e-07, 2e-07, 3e-06, layers.6.mlp.up.bias, ..., ok`."""
    verdict = "ok" if result["same"] else result["words"]
    if "loss" not in result:
        return [name, *[""] * 6, verdict]
    numbers = [f"{result[key]:.0e}" for key in ("loss", "grad_norm")]
    tensors = [text for error, tensor in (result["gradient"], result["value"]) for text in (f"{error:.0e}", tensor)]
    return [name, *numbers, *tensors, verdict]


def errors_row(name: str, results: list[Result], stated: Any = None) -> str:
    """Return a row such as `| bf16 | 30 | 1e-05 | ... |`: the largest errors of a precision's layouts.

    With `stated`, each error is followed by its limit: `1e-05 (3e-05)`.
    """
    errors = [f"{error:.0e}" for error in worst(results)]
    if stated is not None:
        limits = (stated.loss, stated.grad_norm, stated.gradient, stated.value)
        errors = [f"{error} ({limit:.0e})" for error, limit in zip(errors, limits, strict=True)]
    return f"| {name} | {len(results)} | {' | '.join(errors)} |"


def world(size: int | None) -> str:
    """Return text such as ` on 6 ranks`; empty for None, if the number of ranks does not cause the refusal."""
    return "" if size is None else f" on {size} ranks"


def replaced(text: str, name: str, table: str) -> str:
    """Return the text with the content between `<!-- NAME -->` and `<!-- end of NAME -->` replaced."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ConfigError(f"output: the file must have exactly one {begin} and one {end}; add them around the table")
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
