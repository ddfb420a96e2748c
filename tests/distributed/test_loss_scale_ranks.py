"""Every rank of every axis sees an overflow, wherever it was, and skips the same steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from marking import marked

from distributed.cells.layouts import GLOBAL_BATCH, Cell
from distributed.cells.run import Ranks
from distributed.cells.steps import built
from gptlite.config import Config, load
from gptlite.parallelism.boxes import local_tensor
from gptlite.trainer.loss_scale import LossScaler
from gptlite.trainer.state import TrainState


@dataclass(frozen=True)
class Trained:
    """A rank's steps, as (loss scale, skipped, loss), and what it counted."""

    steps: list[tuple[float | None, bool, float]]
    samples: int
    adam: set[float]


def train(config: Config, steps: int, planted: tuple[int, int] | None = None) -> Trained:
    """The first steps of a run; one element of one gradient of a rank is infinite in a step, as (rank, step)."""
    with built(config) as (mesh, state, take_step):

        def plant(state: TrainState) -> None:
            if (mesh.rank, state.step) == planted:
                gradient = next(p.grad for p in state.weights() if p.grad is not None and p.ndim > 1)
                local_tensor(gradient).view(-1)[0] = float("inf")

        results = [take_step(state, plant) for _ in range(steps)]
        counts = {local_tensor(each["step"]).item() for each in state.optimizer.state.values()}
        return Trained([(r.loss_scale, r.skipped, r.loss) for r in results], state.consumed_samples, counts)


STEPS = 16
# From 2**26 down until it fits, then up after every four good steps until it does not.
SCALE = ["precision.initial_scale_power=26", "precision.hysteresis=1", "precision.loss_scale_window=4"]
MIXED = {"tensor": 2, "pipeline": 2, "data": 2}
CELLS = [
    Cell(**MIXED, zero=3, schedule="1f1b", accumulation=4, precision="fp16"),
    Cell(**MIXED, zero=0, schedule="zbv", accumulation=4, sequence=True, precision="amp_o1"),
    Cell(**MIXED, zero=1, schedule="interleaved_1f1b", accumulation=4, tied=False, precision="fp16"),
    Cell(**MIXED, zero=2, schedule="1f1b", accumulation=4, precision="amp_o2"),
    Cell(tensor=8, sequence=True, precision="fp16"),
    Cell(pipeline=4, data=2, zero=2, schedule="zero_bubble", accumulation=4, precision="fp16"),
    Cell(data=8, replicate=2, zero=3, accumulation=3, precision="amp_o1"),
]


@pytest.fixture(scope="module")
def eight():
    with Ranks(8) as ranks:
        yield ranks


@pytest.mark.parametrize("cell", marked(CELLS, slow=2, name=lambda cell: cell.id))
def test_all_ranks_skip_the_same_steps_and_recover(eight, cell):
    ranks = eight.run("distributed.test_loss_scale_ranks:train", load([*cell.overrides(), *SCALE]), STEPS, timeout=200)
    assert all(each == ranks[0] for each in ranks)
    skipped = [was for _, was, _ in ranks[0].steps]
    assert skipped[0]
    assert not all(skipped)
    first = skipped.index(False)
    assert any(skipped[first:])  # it grew until it overflowed again
    assert ranks[0].samples == STEPS * GLOBAL_BATCH
    assert ranks[0].adam == {STEPS - sum(skipped)}
    rule, scale = LossScaler(2.0**26, 4, 1, 1.0, 2.0), []
    for was in skipped:
        scale.append(rule.scale)
        rule.update(was)
    assert [each for each, *_ in ranks[0].steps] == scale
    assert all(loss == pytest.approx(math.log(37), rel=0.1) for *_, loss in ranks[0].steps)


@pytest.mark.slow
def test_an_overflow_on_one_rank_alone_is_everyones(eight):
    """The last layers of the model overflow, on the last ranks of the pipeline; the first hear of it."""
    cell = Cell(**MIXED, zero=1, schedule="1f1b", accumulation=4, precision="fp16")
    ranks = eight.run("distributed.test_loss_scale_ranks:train", load(cell.overrides()), 3, (5, 1), timeout=200)
    assert [step[1] for step in ranks[0].steps] == [False, True, False]
    assert all(each == ranks[0] for each in ranks)
    assert ranks[0].adam == {2}
