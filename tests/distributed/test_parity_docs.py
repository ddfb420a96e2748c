"""docs/parallelism.md says what the matrix says."""

import re

from distributed.matrix import CELLS, REFUSED
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


def test_the_refusals_are_those_of_today():
    assert [row.rstrip(" |").split(" | ")[1] for row in between("refused")] == [each.reason() for each in REFUSED]


def test_the_pictures_are_there():
    names = re.findall(r"\(pictures/([\w-]+\.png)\)", TEXT)
    assert len(names) == 3
    assert [name for name in names if not (DOCS / "pictures" / name).exists()] == []
