"""Every cell of the matrix trains as one process does: the quick ones in every run, the slow ones in every CI run."""

import time
from dataclasses import replace
from itertools import product

import pytest
from marking import marked

from distributed.cells.compare import Pool
from distributed.cells.cover import AXES, CROSSED_AXES, FIRST_MATRIX, crossings, legal_cells, met, pairs
from distributed.cells.layouts import QUICK_STEPS, REFUSED, STEPS, Cell, Refused
from distributed.cells.matrix import CELLS, CHOSEN, CROSSED, OFFLOADED, QUICK, QUICK_CELLS, SLOW

# Values of the axes that are not crossed, so that layouts which differ in them alone count once.
NO_CROSSED = {axis: values[0] for axis, values in AXES.items() if axis not in CROSSED_AXES}


# By world size, so that each world's ranks are started once.
ORDERED = sorted(CELLS, key=lambda cell: (cell.id not in QUICK, cell.id not in SLOW, -cell.world))


@pytest.mark.parametrize("cell", marked(ORDERED, len(QUICK), len(SLOW), lambda cell: cell.id))
def test_a_layout_trains_as_one_process_does(cell: Cell, pool: Pool):
    """One that offloads, besides, to the bit as without: `run_cell` takes the steps of both."""
    pool.check(cell, timeout=240, steps=QUICK_STEPS if cell.id in QUICK else STEPS)


def test_offload_meets_every_stage_and_axis():
    assert len({cell.id for cell in OFFLOADED}) == len(OFFLOADED) == 44
    assert {cell.world for cell in OFFLOADED} == {8}
    met = {(cell.offload, cell.zero, cell.tensor > 1, cell.pipeline > 1) for cell in OFFLOADED}
    assert len(met) == 2 * 4 * 2 * 2


@pytest.mark.slow
def test_the_crossed_cells_meet_every_three_values_that_can_meet_and_every_two_of_all_axes():
    assert len(set(CROSSED)) == len(CROSSED) >= 80
    assert {cell.world for cell in CROSSED} == {8}
    layouts = [cell for cell in (*legal_cells(), *legal_cells(context=True)) if cell.context < 8]
    placed = {
        replace(cell, offload=offload, precision=precision, **NO_CROSSED)
        for cell, offload, precision in product(layouts, CROSSED_AXES["offload"], CROSSED_AXES["precision"])
        if (cell.context, offload, precision) != FIRST_MATRIX
    }
    three = set().union(*(met(cell, CROSSED_AXES, 3) for cell in placed))
    cuts = [axis for axis in CROSSED_AXES | AXES if axis not in ("offload", "precision")]
    two = set().union(*(met(cell, cuts, 2) for cell in layouts))
    two |= {
        ((kind, value), (axis, each))
        for kind in ("offload", "precision")
        for axis in AXES.keys() - CROSSED_AXES.keys()
        for value, each in product(CROSSED_AXES[kind], AXES[axis])
    }
    assert three | two <= set().union(*map(crossings, CROSSED))


def test_the_matrix_is_large_and_covers_every_pair_and_so_do_the_cells_of_each_ci_run():
    everything = set().union(*map(pairs, legal_cells()))
    assert len({cell.id for cell in CHOSEN}) >= 100
    assert len({cell.id for cell in CELLS}) == len(CELLS)
    assert set().union(*map(pairs, CHOSEN)) == everything
    assert set().union(*(pairs(cell) for cell in CHOSEN if cell.id in QUICK | SLOW)) == everything
    values = {(axis, value) for axis, values in AXES.items() for value in values}
    assert set(QUICK_CELLS) <= set(CELLS)
    assert {(axis, getattr(cell, axis)) for cell in QUICK_CELLS for axis in AXES} == values
    assert {cell.world for cell in QUICK_CELLS} == {8}
    assert {2, 4, 6, 8} == {cell.world for cell in CELLS}


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.overrides.replace("parallelism.", ""))
def test_an_illegal_combination_is_refused_with_its_reason(refused: Refused):
    start = time.monotonic()
    reason = refused.reason()
    assert refused.names in reason
    assert "\n" not in reason
    assert time.monotonic() - start < 20  # no rank was started
