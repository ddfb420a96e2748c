"""Every cell of the matrix trains as one process does: the quick ones in every run, the slow ones in every CI run."""

import time
from collections.abc import Iterator

import pytest
from marking import marked as marks

from distributed.matrix import (
    AXES,
    CELLS,
    CHOSEN,
    COMPILED,
    OFFLOADED,
    QUICK,
    REFUSED,
    SLOW,
    Cell,
    Refused,
    legal_cells,
    pairs,
)
from distributed.parity_cells import Pool, References, judge
from gptlite.parity.report import row

COMPILING_SECONDS = 240


def marked(cell: Cell) -> object:
    marks = [] if cell.id in QUICK else [pytest.mark.slow if cell.id in SLOW else pytest.mark.long]
    return pytest.param(cell, id=cell.id, marks=marks)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(References(tmp_path_factory.mktemp("references")))
    yield pool
    pool.close()


# By world size, so that each world's ranks are started once.
@pytest.mark.parametrize("cell", [marked(cell) for cell in sorted(CELLS, key=lambda cell: -cell.world)])
def test_a_layout_trains_as_one_process_does(cell: Cell, pool: Pool):
    result = pool.run(cell, timeout=COMPILING_SECONDS if cell in COMPILED else 120)
    same, words = judge(pool.references, cell, result)
    assert same, "\n".join([words, *map(row, result.comparisons)])


@pytest.mark.parametrize("cell", marks(OFFLOADED, quick=2, slow=6, name=lambda cell: cell.id))
def test_a_layout_that_offloads_trains_as_one_process_does_and_to_the_bit_as_without(cell: Cell, pool: Pool):
    result = pool.run(cell, timeout=240)
    same, words = judge(pool.references, cell, result)
    assert same, "\n".join([words, *map(row, result.comparisons)])


def test_offload_meets_every_stage_and_axis():
    assert len({cell.id for cell in OFFLOADED}) == len(OFFLOADED) == 44
    assert {cell.world for cell in OFFLOADED} == {8}
    met = {(cell.offload, cell.zero, cell.tensor > 1, cell.pipeline > 1) for cell in OFFLOADED}
    assert len(met) == 2 * 4 * 2 * 2


def test_the_matrix_is_large_and_covers_every_pair_and_so_do_the_cells_of_each_ci_run():
    everything = set().union(*map(pairs, legal_cells()))
    assert len({cell.id for cell in CHOSEN}) >= 100
    assert len({cell.id for cell in CELLS}) == len(CELLS)
    assert set().union(*map(pairs, CHOSEN)) == everything
    assert set().union(*(pairs(cell) for cell in CHOSEN if cell.id in QUICK | SLOW)) == everything
    values = {(axis, value) for axis, values in AXES.items() for value in values}
    assert {(axis, getattr(cell, axis)) for cell in CELLS if cell.id in QUICK for axis in AXES} == values
    assert {cell.world for cell in CELLS if cell.id in QUICK} == {8}
    assert {2, 4, 6, 8} == {cell.world for cell in CELLS}


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.overrides.replace("parallelism.", ""))
def test_an_illegal_combination_is_refused_with_its_reason(refused: Refused):
    start = time.monotonic()
    reason = refused.reason()
    assert refused.names in reason
    assert "\n" not in reason
    assert time.monotonic() - start < 20  # no rank was started
