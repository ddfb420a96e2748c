"""docs/parallelism_checks.md and docs/parallelism_matrix.csv say what the matrix says."""

import csv
import re
from dataclasses import astuple

from distributed.cells.compare import STATED
from distributed.cells.layouts import REFUSED
from distributed.cells.matrix import CELLS
from gptlite.config.schema import CONF_DIR

DOCS = CONF_DIR.parent / "docs"
TEXT = (DOCS / "parallelism_checks.md").read_text(encoding="utf-8")
NUMBERS = ("loss", "gradient norm", "worst gradient", "worst value")
PRECISION = {cell.id: cell.precision for cell in CELLS}


def between(name: str) -> str:
    """What stands between the marks of a generated part."""
    (text,) = re.findall(rf"<!-- {name} -->\n(.*?)<!-- end of {name} -->", TEXT, re.DOTALL)
    return text


def rows(name: str) -> list[list[str]]:
    """The cells of a generated table, without its head."""
    lines = [line for line in between(name).splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ") for line in lines[1:]]


def matrix() -> list[dict[str, str]]:
    """The rows of the CSV file."""
    with open(DOCS / "parallelism_matrix.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_cell_has_its_row_and_was_the_same_as_one_process():
    found = matrix()
    assert [row["layout"] for row in found[: len(CELLS)]] == [cell.id for cell in CELLS]
    assert [row["layout"] for row in found if row["verdict"] != "ok"] == []
    assert len({row["layout"] for row in found}) == len(found) >= 1500


def test_the_page_has_the_largest_errors_of_the_fuzz():
    drawn = matrix()[len(CELLS) :]
    assert between("fuzz").startswith(f"{len(drawn):,} of {len(drawn):,} configurations agree.")
    table = {name: (int(count), [*map(float, errors)]) for name, count, *errors in rows("fuzz")}
    assert table.keys() == {"fp32", *STATED}
    for name, (count, errors) in table.items():
        of_precision = [row for row in drawn if name in row["layout"].split("-")]
        assert count == len(of_precision)
        assert errors == [max(float(row[key]) for row in of_precision) for key in NUMBERS]


def test_the_page_has_the_largest_errors_of_each_precision():
    largest: dict[str, list[float]] = {}
    for row in matrix()[: len(CELLS)]:
        errors = [float(row[key] or 0) for key in NUMBERS]
        kept = largest.setdefault(PRECISION[row["layout"]], errors)
        largest[PRECISION[row["layout"]]] = [max(pair) for pair in zip(kept, errors, strict=True)]
    table = {name: (int(count), [*map(float, errors)]) for name, count, *errors in rows("cells")}
    assert table == {name: ([*PRECISION.values()].count(name), errors) for name, errors in largest.items()}
    lead = between("cells").splitlines()[0]
    assert lead.startswith(f"{len(CELLS)} of {len(CELLS)} layouts ")
    assert [float(error) for error in re.findall(r"\d+e[+-]\d+", lead)] == largest["fp32"]


def test_the_bounds_of_16_bits_are_those_that_cells_are_judged_by_and_every_cell_kept_them():
    table = rows("bounds")
    assert [name for name, *_ in table] == list(STATED)
    for name, count, *columns in table:
        assert int(count) == sum(cell.precision == name for cell in CELLS)
        found, bounds = zip(*(map(float, re.findall(r"[\d.e+-]+", column)) for column in columns), strict=True)
        assert bounds == astuple(STATED[name])
        assert all(error < bound for error, bound in zip(found, bounds, strict=True))


def test_the_refusals_are_those_of_today():
    assert [cause for _, cause in rows("refused")] == [each.cause() for each in REFUSED]


def test_the_pictures_are_there():
    text = (DOCS / "parallelism.md").read_text(encoding="utf-8")
    names = re.findall(r"\(pictures/([\w-]+\.png)\)", text)
    assert len(names) == 3
    assert [name for name in names if not (DOCS / "pictures" / name).exists()] == []
