"""docs/parallelism.md says what the matrix says."""

import re
from dataclasses import astuple

from distributed.bounds import STATED
from distributed.matrix import CELLS
from distributed.refused import REFUSED
from gptlite.config import CONF_DIR

DOCS = CONF_DIR.parent / "docs"
TEXT = (DOCS / "parallelism.md").read_text(encoding="utf-8")


def between(name: str) -> list[str]:
    """The rows of a generated table."""
    (table,) = re.findall(rf"<!-- {name} -->\n(.*?)<!-- end of {name} -->", TEXT, re.DOTALL)
    return [line for line in table.splitlines() if line.startswith("| ")][1:]


def test_every_cell_has_its_row_and_was_the_same_as_one_process():
    rows = {row.split(" | ")[0].removeprefix("| "): row for row in between("cells")}
    assert list(rows) == [cell.id for cell in CELLS]
    assert [name for name, row in rows.items() if not row.endswith(" | ok |")] == []


def test_the_bounds_of_16_bits_are_those_that_cells_are_judged_by_and_every_cell_kept_them():
    rows = [row.strip("| ").split(" | ") for row in between("bounds")]
    assert [name for name, *_ in rows] == list(STATED)
    for name, count, *columns in rows:
        assert int(count) == sum(cell.precision == name for cell in CELLS)
        found, bounds = zip(*(map(float, re.findall(r"[\d.e+-]+", column)) for column in columns), strict=True)
        assert bounds == astuple(STATED[name])
        assert all(error < bound for error, bound in zip(found, bounds, strict=True))


def test_the_refusals_are_those_of_today():
    assert [row.rstrip(" |").split(" | ")[1] for row in between("refused")] == [each.reason() for each in REFUSED]


def test_the_pictures_are_there():
    names = re.findall(r"\(pictures/([\w-]+\.png)\)", TEXT)
    assert len(names) == 3
    assert [name for name in names if not (DOCS / "pictures" / name).exists()] == []
