"""Blending of data sets: each sample is assigned to one set, in blocks of 65,536 that keep the proportions.

A block of B samples is assigned by systematic sampling (Madow and Madow 1944, On the Theory of Systematic Sampling).
The data sets are adjacent intervals on a line of length B: a set with the fraction w of the total weight is w B long.
Sampling points lie one unit apart, one for each sample. A set gets the points in its interval, which are floor(w B) or
ceil(w B). The points of successive blocks are shifted by van der Corput's sequence (1935), so rounding errors do not
add up over blocks. The number of samples of a data set before a given block is a sum over the bits of the block number.

Inside a block the samples are in a pseudo-random order (order.py).
"""

from collections.abc import Sequence

import numpy as np

from gptlite.data.order import order_key, permute

BLOCK = 65_536  # samples
_UNIT_BITS = 32  # fixed-point bits of the distance between two sampling points
_UNIT = 1 << _UNIT_BITS


class BlendPlan:
    """Blend of data sets by weights, which need not sum to one. Methods are pure functions of their arguments."""

    def __init__(self, weights: Sequence[float]):
        share = np.asarray(weights, dtype=np.float64)
        edges = np.cumsum(share) / share.sum() * BLOCK * _UNIT  # below 2**53, so exact to 2**-20 of a sample
        self._edges = np.concatenate([[0], np.rint(edges).astype(np.int64)])
        self._edges[-1] = BLOCK * _UNIT  # exact; otherwise the last set could lose a sample

    def before(self, block: int) -> np.ndarray:
        """Return the number of samples of each data set in the blocks 0 to `block` - 1: int64[sets]."""
        whole, rest = self._edges >> _UNIT_BITS, self._edges & (_UNIT - 1)
        teeth, first = whole * block, 0
        for bit in reversed(range(block.bit_length())):  # shifts of blocks [first, first + 2**bit) are evenly spaced
            if block >> bit & 1:
                step = _UNIT >> bit
                teeth += np.clip((rest - _shift(first) + step - 1) // step, 0, 1 << bit)
                first += 1 << bit
        return np.diff(teeth)

    def counts(self, block: int) -> np.ndarray:
        """Return the number of samples of each data set in one block: int64[sets]."""
        return np.diff((self._edges >> _UNIT_BITS) + (_shift(block) < (self._edges & (_UNIT - 1))))

    def assign(self, block: int, seed: int, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Return each sample's data set, and the number of earlier samples of that set in the block: both int64[BLOCK].

        `start` is the number of the run's sample at which block 0 begins.
        """
        ends = np.cumsum(self.counts(block))
        # `start` is part of the key, so that each era has an order of its own.
        slots = permute(np.arange(BLOCK), BLOCK, order_key(seed, f"blend/{start}", block))
        sets = np.searchsorted(ends, slots, side="right")
        by_set = np.argsort(sets, kind="stable")  # stable: samples of a set keep their order in the block
        ranks = np.empty(BLOCK, dtype=np.int64)
        ranks[by_set] = np.arange(BLOCK) - np.concatenate([[0], ends])[sets[by_set]]
        return sets, ranks


def _shift(block: int) -> int:
    """Return element `block` of van der Corput's sequence in units of 2**-32: the bits of `block`, reversed."""
    return int(f"{block:0{_UNIT_BITS}b}"[::-1], 2)
