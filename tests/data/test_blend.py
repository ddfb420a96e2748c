"""Weights are kept in every block, and every sample of every data set comes once."""

import math

import numpy as np
import pytest

from gptlite.data.blend import BLOCK, BlendPlan

WEIGHTS = {
    "two": [0.7, 0.3],
    "not of one": [7, 3, 11.5],
    "tiny": [1.0, 1e-6, 3e-6],
    "third": [1, 1, 1],
    "many": list(np.random.default_rng(1).dirichlet(np.full(300, 0.3)) + 1e-7),
    "one": [2.0],
}


def bound(blocks):
    """Both ends of a stretch are off by van der Corput's discrepancy, log2(N) / 3 + 1 at most."""
    return 2 * (math.log2(blocks) / 3 + 1)


@pytest.mark.parametrize("name", WEIGHTS)
def test_no_block_is_off_by_a_sample_and_the_total_does_not_drift(name):
    weights = np.array(WEIGHTS[name]) / sum(WEIGHTS[name])
    plan, total = BlendPlan(WEIGHTS[name]), np.zeros(len(weights), dtype=np.int64)
    for block in range(1500):
        counts = plan.counts(block)
        assert counts.sum() == BLOCK
        assert counts.min() >= 0
        assert np.abs(counts - weights * BLOCK).max() <= 1 + 1e-6
        if block % 97 == 0:
            assert plan.before(block).tolist() == total.tolist()
        total += counts
        assert np.abs(total - weights * BLOCK * (block + 1)).max() < bound(block + 1)
    far = 10**9
    assert np.abs(plan.before(far) - weights * BLOCK * far).max() < bound(far)


@pytest.mark.parametrize("name", ["two", "tiny", "many"])
@pytest.mark.parametrize("block", [0, 1, 12345])
def test_a_block_is_made_of_its_counts_in_a_mixed_order(name, block):
    plan = BlendPlan(WEIGHTS[name])
    sets, ranks = plan.assign(block, seed=3, start=0)
    counts = plan.counts(block)
    assert np.bincount(sets, minlength=len(counts)).tolist() == counts.tolist()
    for number in np.flatnonzero(counts)[:20]:
        assert ranks[sets == number].tolist() == list(range(counts[number]))  # in the order they come
    first = np.bincount(sets[: BLOCK // 16], minlength=len(counts)) * 16
    assert np.abs(first - counts).max() < 16 * 5 * np.sqrt(counts.max() / 16)  # no set is at one end


def test_blocks_seeds_and_eras_have_orders_of_their_own():
    plan = BlendPlan([1, 1])
    orders = [plan.assign(*key)[0] for key in ((0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 5))]
    for a in range(4):
        for b in range(a):
            assert abs((orders[a] == orders[b]).mean() - 0.5) < 0.02
