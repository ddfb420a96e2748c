"""Ranks with fewer samples than others train as one process does: fillers change nothing."""

import pytest
from distributed.cells.compare import Pool, judge
from distributed.cells.experts import BIAS, LOSSES, SIGMOID
from distributed.cells.layouts import QUICK_STEPS, STEPS
from distributed.conftest import pool  # noqa: F401
from marking import marked

from elastic.uneven import Uneven

DOCUMENTS = ("data.packing=documents",)
# Nine experts, for three data ranks. 48 = 5 x 10 - 2 = 7 x 7 - 1; one data rank gets a whole micro-batch of fillers
# where 3 data ranks take 10 each: 48 = 10 x 6 - 12.
NINE = ("model.moe.experts=9", "model.moe.top_k=2", "model.moe.d_ff=16", "model.moe.sequence_loss=0.1",
        "model.moe.z_loss=0.01", "model.moe.bias_rate=0.01")  # fmt: skip
EXPERT = ("parallelism.expert=3",)
QUICK = [
    Uneven(data=2, zero=2, micro=7, shared=LOSSES),
    Uneven(pipeline=2, schedule="1f1b", zero=1, micro=7, checkpointing="full", shared=BIAS),
]
SLOW = [
    *(Uneven(data=3, zero=zero, micro=micro) for zero, micro in ((0, 5), (1, 7), (2, 10), (3, 10))),
    Uneven(data=3, zero=3, micro=10, checkpointing="selective", more=("trainer.compile=true",)),
    *(Uneven(pipeline=2, data=3, zero=zero, schedule="1f1b", micro=5) for zero in (0, 1, 3)),
    Uneven(pipeline=2, data=3, zero=2, schedule="zbv", micro=5),
    Uneven(pipeline=2, data=3, zero=1, schedule="interleaved_1f1b", micro=3, shared=LOSSES),
    Uneven(tensor=2, data=3, zero=2, sequence=True, micro=5, shared=SIGMOID),
    Uneven(tensor=2, data=3, zero=0, micro=10),
    Uneven(context=2, data=3, zero=3, micro=5, shared=LOSSES),
    *(Uneven(data=3, zero=zero, micro=10, shared=NINE, more=EXPERT) for zero in (0, 2, 3)),
    Uneven(data=3, zero=2, micro=10, shared=DOCUMENTS),
    Uneven(pipeline=2, data=3, zero=1, schedule="1f1b", micro=7, shared=DOCUMENTS),
    Uneven(data=3, zero=1, micro=10, shared=("optimizer=muon",)),
    Uneven(data=3, zero=3, micro=7, shared=("optimizer=muon",)),
    *(Uneven(data=3, zero=zero, micro=10, precision="fp16") for zero in (1, 3)),
    Uneven(data=3, zero=2, micro=7, precision="bf16"),
    Uneven(data=3, zero=1, micro=7, offload="cpu"),
]


@pytest.mark.parametrize("cell", marked([*QUICK, *SLOW], len(QUICK), len(SLOW), lambda cell: cell.id))
def test_fillers_change_nothing(cell: Uneven, pool: Pool):  # noqa: F811
    pool.check(cell, timeout=240, steps=QUICK_STEPS if cell in QUICK else STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["counted", "routed"])
def test_fillers_that_count_are_seen(bug: str, pool: Pool):  # noqa: F811
    cell = QUICK[0]
    result = pool.run(cell, runner=f"elastic.uneven:run_{bug}", timeout=240)
    assert not judge(pool.references, cell, result)[0]
