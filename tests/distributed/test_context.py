"""Attention over sequences that are cut is attention over whole ones."""

from collections.abc import Iterator

import pytest

from distributed.context_cases import BATCH, LENGTH, WIDTH
from distributed.ranks import Ranks
from gptlite.ops.config import Attention

CASES = "distributed.context_cases:"


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, collective_timeout=200) as started:
        yield started


PATHS = [
    (Attention.matmul, 0.0),
    (Attention.matmul, 0.3),
    (Attention.sdpa, 0.0),
    (Attention.fused, 0.0),
    (Attention.fused, 0.3),
    (Attention.fused_softmax, 0.0),
]


@pytest.mark.parametrize("refill", [True, False], ids=["gathered_again", "kept"])
@pytest.mark.parametrize(("choice", "dropout"), PATHS, ids=str)
def test_outputs_and_gradients_are_those_of_whole_sequences(
    ranks: Ranks, choice: Attention, dropout: float, refill: bool
):
    for errors in ranks.run(CASES + "errors", choice, dropout, refill, timeout=200):
        assert errors.keys() == {"out", "x", "qkv.weight", "qkv.bias", "proj.weight", "proj.bias"}
        assert max(errors.values()) < 1e-6, errors


def test_gathered_keys_and_values_take_no_memory_between_forward_and_backward(ranks: Ranks):
    whole = 2 * BATCH * LENGTH * WIDTH * 4
    assert set(ranks.run(CASES + "kept_bytes", True, timeout=200)) == {(whole, 0, whole)}
    assert set(ranks.run(CASES + "kept_bytes", False, timeout=200)) == {(whole, whole, whole)}
