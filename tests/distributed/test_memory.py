"""Bytes of model state per rank are what the design says, to 5%, and what else a rank takes is bounded."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest
from marking import marked

from distributed.cells.memory import Case, Measured
from distributed.cells.run import Ranks

CASES = "distributed.cells.memory:"
TOLERANCE = 0.05
# The most that all but model state takes, in fp32 blocks: a block gathered, the next one on its way (in a collective's
# buffer, and out of it), the block's gradients, what is being reduced of it and of the one before, few activations.
BLOCKS = 6
REAL_BLOCKS = 10  # where gloo's own threads may be the last to give buffers back, which is noticed late

# Bytes a parameter of stages 0-3 over n ranks that shard, gradient accumulation on.
DESIGN = {
    "bf16": (lambda n: 18, lambda n: 6 + 12 / n, lambda n: 2 + 16 / n, lambda n: 16 / n),
    "fp32": (lambda n: 20, lambda n: 8 + 12 / n, lambda n: 4 + 16 / n, lambda n: 16 / n),
}


def excess(case: Case, found: Measured) -> float:
    """Of model state over the design's formula, relative."""
    return found.a_parameter / DESIGN[case.precision][case.zero](case.data // case.replicate) - 1


def wrong(cases: list[Case], results: list[Measured], most: float = BLOCKS) -> dict[Case, str]:
    """The cases that take more or less than the design says, in model state or beside it."""
    found = {}
    for case, result in zip(cases, results, strict=True):
        words = f"state {excess(case, result):+.1%}, beside it {result.blocks:.1f} blocks"
        if abs(excess(case, result)) > TOLERANCE or result.blocks > most:
            found[case] = words
    return found


Imagined = Callable[..., list[Measured]]


@pytest.fixture(scope="module")
def imagined() -> Iterator[Imagined]:
    """Measures cases on one process, one after the other."""
    with Ranks(1) as alone:
        yield lambda cases, planted=False: alone.run(CASES + "imagine", cases, planted, timeout=240)[0]


def cells(precision: str) -> list[Case]:
    """Stages 0-3 at data degrees, without a pipeline (ranks are alike) and with one (its two ends)."""
    degrees = list(product((1, 2), (2, 8) if precision == "fp32" else (2, 4, 8), range(4)))
    last = [Case(data, pipeline, zero, precision, (pipeline - 1) * data) for pipeline, data, zero in degrees]
    return last + [replace(case, rank=0) for case in last if case.world == 16]


@pytest.mark.parametrize("precision", marked(["fp32", "bf16"], quick=1, slow=1))
def test_model_state_is_as_designed(precision, imagined: Imagined):
    cases = cells(precision)
    results = imagined(cases)
    assert wrong(cases, results) == {}
    for case, result in zip(cases, results, strict=True):
        assert result.predicted == result.found.state, case


def test_gradients_that_a_pipeline_holds_back_are_seen(imagined: Imagined):
    """What torch's own stage does with ZeRO 2 and 3: the planted error."""
    cases = [Case(8, 2, zero, "bf16", 15) for zero in (1, 2, 3)]
    results = imagined(cases, planted=True)
    assert list(wrong(cases, results)) == cases[1:]
    # Stage 1's memory: 4 bytes of gradients a parameter instead of 4/8, and beside it what stage 3 should have freed.
    for result in results[1:]:
        assert result.found.state.gradients == pytest.approx(4 * result.parameters, rel=0.01)


@pytest.mark.parametrize("schedule", marked(["interleaved_1f1b", "gpipe"], quick=1, slow=1))
def test_other_schedules_take_the_same(schedule, imagined: Imagined):
    cases = [Case(8, 2, zero, "bf16", 15, schedule, accumulation=4) for zero in range(4)]
    assert wrong(cases, imagined(cases)) == {}


def test_shards_that_are_replicated_take_what_their_number_says(imagined: Imagined):
    cases = [Case(8, 1, zero, "bf16", 7, replicate=2) for zero in (1, 2, 3)]
    assert wrong(cases, imagined(cases)) == {}


def test_one_micro_batch_accumulates_nothing(imagined: Imagined):
    """Then stage 1 is as stage 2, and stage 0 has the gradients only where gathered parameters are gone."""
    cases = [Case(8, 1, zero, "bf16", 7, accumulation=1) for zero in range(4)]
    results = imagined(cases)
    assert [result.a_parameter for result in results] == pytest.approx([16, 3.5, 3.5, 2], rel=TOLERANCE)
    for case, result in zip(cases, results, strict=True):
        assert result.predicted == result.found.state, case


def test_one_rank_takes_16_bytes_a_parameter(imagined: Imagined):
    cases = [Case(1, 1, 0, precision) for precision in DESIGN]
    assert [result.a_parameter for result in imagined(cases)] == pytest.approx([16, 16], rel=0.001)


REAL = {2: [(2, 1)], 4: [(4, 1), (2, 2)], 8: [(8, 1), (4, 2)]}


@pytest.mark.parametrize("world", marked([2, 4, 8], slow=1))
def test_real_ranks_take_what_imagined_ones_do(world, imagined: Imagined):
    cases = [Case(data, pp, zero, "bf16") for data, pp in REAL[world] for zero in range(4)]
    with Ranks(world, collective_timeout=200) as ranks:
        results = [ranks.run(CASES + "measure", case, timeout=200) for case in cases]
    ends = sorted({0, world - 1})
    alone = iter(imagined([replace(case, rank=rank) for case in cases for rank in ends]))
    for case, result in zip(cases, results, strict=True):
        assert wrong([case] * world, result, REAL_BLOCKS) == {}
        assert [result[rank].found.state for rank in ends] == [next(alone).found.state for _ in ends]
