"""The permutation of training samples."""

import numpy as np
import pytest

from gptlite.data.order import order_key, permute


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 100, 1000, 4097, 65536])
def test_the_permutation_is_a_bijection(size):
    image = permute(np.arange(size), size, order_key(1, "d", 0))
    assert np.array_equal(np.sort(image), np.arange(size))


def test_one_index_at_a_time_gives_the_same_as_all_at_once():
    key = order_key(7, "d", 3)
    together = permute(np.arange(101), 101, key)
    assert [int(permute(n, 101, key)) for n in range(101)] == together.tolist()


def test_is_fixed_for_all_time():
    """A change here changes the data order of every run that is resumed."""
    assert permute(np.arange(10), 10, order_key(1234, "train", 0)).tolist() == [0, 3, 6, 4, 7, 5, 8, 1, 2, 9]


def test_positions_of_a_huge_dataset_cost_nothing():
    size = 10**15
    image = permute(np.arange(10_000), size, order_key(1, "d", 0))
    assert len(set(image.tolist())) == 10_000
    assert image.min() >= 0
    assert image.max() < size
    assert abs(image.mean() / size - 0.5) < 0.02


def test_every_place_is_equally_likely():
    """Chi-squared over 2000 keys: where sample 0 of 20 lands. 19 degrees of freedom; 50 has p < 1e-4."""
    counts = np.bincount([int(permute(0, 20, order_key(seed, "d", 0))) for seed in range(2000)], minlength=20)
    assert ((counts - 100) ** 2 / 100).sum() < 50


@pytest.mark.parametrize("other", [(2, "d", 0), (1, "e", 0), (1, "d", 1)])
def test_seed_dataset_and_epoch_each_change_the_order(other):
    order = permute(np.arange(100), 100, order_key(1, "d", 0))
    assert not np.array_equal(order, permute(np.arange(100), 100, order_key(*other)))


@pytest.mark.parametrize("index", [-1, 10])
def test_refuses_an_index_outside(index):
    with pytest.raises(IndexError, match=r"range\(10\)"):
        permute(index, 10, order_key(1, "d", 0))
