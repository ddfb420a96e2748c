"""What a block leaves to the next norm is the same in every layout: against one process, whose blocks add up."""

import pytest
from marking import marked

from distributed.deferred_cases import CELLS
from distributed.parity_cells import Pool, judge
from gptlite.parity.report import row


@pytest.mark.parametrize("cell", marked(CELLS, slow=5, name=lambda cell: cell.id))
def test_sums_left_to_the_next_norm_train_as_one_process_does(cell, pool: Pool):
    result = pool.run(cell, runner="distributed.deferred_cases:run_deferred")
    same, words = judge(pool.references, cell, result)
    assert same, "\n".join([words, *map(row, result.comparisons)])
