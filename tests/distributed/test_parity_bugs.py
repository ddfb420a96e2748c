"""The comparison finds what it is for: each planted bug, named by a tensor or number it must spoil."""

import pytest
from marking import marked

from distributed.cells.bugs import BUGS
from distributed.cells.compare import Pool, judge

CELLS = list(dict.fromkeys(bug.cell for bug in BUGS.values()))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUGS, key=lambda name: BUGS[name].cell.world))
def test_a_planted_bug_is_found_and_named(name: str, pool: Pool):
    bug = BUGS[name]
    same, words = judge(pool.references, bug.cell, pool.run(bug.cell, name))
    assert not same
    assert words.startswith(f"different: step 1: {bug.names} is off by ")


@pytest.mark.parametrize("cell", marked(CELLS, slow=4, name=lambda cell: cell.id))
def test_without_a_bug_the_same_layouts_pass(cell, pool: Pool):
    pool.check(cell)


def test_every_axis_has_its_bugs():
    assert {name.partition(":")[0] for name in BUGS} == {*"tensor sequence context pipeline expert data zero".split()}
