"""Layouts keep documents apart as one process does: what says where they begin reaches every part and every rank."""

import pytest

from distributed.cells.compare import Pool, judge
from distributed.cells.matrix import Cell

DOCUMENTS = ("data.packing=documents",)
PLAIN = (*DOCUMENTS, "model.dropout=0.0")
CELLS = [
    Cell(tensor=2, data=2, zero=3, sequence=True, checkpointing="full", shared=DOCUMENTS),
    Cell(pipeline=2, data=2, zero=2, schedule="zbv", accumulation=4, shared=DOCUMENTS),
    Cell(context=2, pipeline=2, schedule="1f1b", accumulation=4, checkpointing="selective", shared=PLAIN,
         more=("ops.attention=sdpa",)),
    Cell(context=2, tensor=2, sequence=True, shared=DOCUMENTS),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_a_layout_keeps_documents_apart_as_one_process_does(cell: Cell, pool: Pool):
    pool.check(cell, timeout=240)


@pytest.mark.slow
def test_the_reference_is_another_run_than_without(pool: Pool):
    """What is compared with a run that does not keep documents apart is not the same."""
    cell = Cell(tensor=2, data=2, zero=3, sequence=True, checkpointing="full", more=DOCUMENTS)
    result = pool.run(cell, timeout=240)
    assert not judge(pool.references, cell, result)[0]
