"""Every layout of a mixture of experts trains as one process does, with the same loads."""

import pytest
from marking import marked

from distributed.cells.compare import Pool
from distributed.cells.experts import BALANCES, CELLS, COMPILED, DEGREES, HYBRID, QUICK, SELECTIVE
from distributed.cells.layouts import QUICK_STEPS, STEPS

FIRST = (37, 70)  # a pipeline; tensor, context and expert parallelism with ZeRO
OTHERS = [cell for index, cell in enumerate(CELLS) if index not in FIRST]
LAYOUTS = [*QUICK, SELECTIVE, *(CELLS[index] for index in FIRST), COMPILED, *OTHERS, HYBRID]


@pytest.mark.parametrize("cell", marked(LAYOUTS, quick=len(QUICK), slow=10, name=lambda cell: cell.id))
def test_a_layout_trains_as_one_process_does(cell, pool: Pool):
    pool.check(cell, timeout=240, steps=QUICK_STEPS if cell in QUICK else STEPS)


def test_the_matrix_is_large_and_meets_every_axis_and_way_of_balancing():
    assert len({cell.id for cell in CELLS}) == len(CELLS) >= 80
    assert {cell.world for cell in CELLS} == {8}
    assert {cell.shared for cell in CELLS} == set(BALANCES)
    assert {(c.tensor, c.pipeline, c.context, c.data) for c in CELLS} == set(DEGREES)
    assert {(c.more, c.zero) for c in CELLS} == {
        ((f"parallelism.expert={e}",), z) for e in (1, 2, 4, 8) for z in range(4)
    }
