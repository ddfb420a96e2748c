"""parallelism.compression: compressed gradients with error feedback, on every layout."""

import pytest

from distributed.cells.layouts import BASE
from distributed.cells.run import Ranks
from gptlite.config import load

CASES = "distributed.cells.compression"
STEPS = 30
ROUNDING = 1e-6  # of fp32, relative to the sum of absolute inputs over all steps


def words(layout: str, *more: str) -> list[str]:
    return [*BASE, "model.num_layers=4", *(f"parallelism.{each}" for each in layout.split()), *more]


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("zero", [0, 3])
def test_what_is_sent_and_the_errors_are_what_went_in(two: Ranks, codec: str, zero: int):
    layout = words(f"data=2 zero={zero} compression={codec}", "data.micro_batch_size=12")
    results = two.run(f"{CASES}:train", load(layout), 3)
    for each in results:
        assert each.worst < ROUNDING
        assert each.sent == each.planned > 0
