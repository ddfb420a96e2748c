"""What a block leaves to the next norm is the same in every layout: against one process, whose blocks add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from marking import marked

from distributed.cells.bugs import CONTEXT, PIPELINE, SEQUENCE, SHARDED, SPLIT, TENSOR, ZERO
from distributed.cells.compare import Pool, Result, run_cell
from gptlite.models.gpt.model import ResidualStream
from gptlite.ops import select
from gptlite.ops.select import Ops

DEEP = replace(SPLIT, shared=("model.num_layers=8",))  # two blocks to each of four parts
CELLS = [
    *(SEQUENCE, ZERO, DEEP, CONTEXT, PIPELINE),
    *(replace(DEEP, sequence=True, schedule="zbv"), replace(SHARDED, precision="bf16"), replace(TENSOR, tied=False)),
]


def run_deferred(*arguments: Any) -> Result | None:
    """run_cell, on every rank, with that choice made for the CPU."""
    choose, normed, seen = select.choose_ops, ResidualStream.normed, []

    def chosen(*args: Any, **options: Any) -> Ops:
        return replace(choose(*args, **options), deferred_add=True)

    def noted(stream: ResidualStream, *args: Any) -> Any:
        seen.append(stream.bias)
        return normed(stream, *args)

    with patch.object(select, "choose_ops", chosen), patch.object(ResidualStream, "normed", noted):
        result = run_cell(*arguments)
    assert seen, "no block has left a sum"
    return result


@pytest.mark.parametrize("cell", marked(CELLS, slow=5, name=lambda cell: cell.id))
def test_sums_left_to_the_next_norm_train_as_one_process_does(cell, pool: Pool):
    pool.check(cell, runner="distributed.test_deferred_add:run_deferred")
