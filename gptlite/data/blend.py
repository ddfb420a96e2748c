"""Which data set each sample of a blend comes from: blocks of 65,536, the weights kept in every one of them.

Set the weights side by side on a line as long as a block. A block lays a comb on it, one tooth a sample, one unit
apart, and a data set gets the teeth in its stretch: floor(w B) or ceil(w B) of them, never further off than that
(systematic sampling: Madow and Madow 1944, On the Theory of Systematic Sampling). The combs of successive blocks are
shifted by van der Corput's sequence (1935), so the remainders go round: totals over many blocks stay as close, and how
many samples of a set came before any block is a sum over that block number's bits.

Inside a block the samples are in a pseudo-random order (order.py).
"""

from collections.abc import Sequence

import numpy as np

from gptlite.data.order import order_key, permute

BLOCK = 65_536  # samples
_UNIT_BITS = 32  # of the distance of two teeth
_UNIT = 1 << _UNIT_BITS


class BlendPlan:
    """The blend of data sets with these weights, which need not sum to one. All of it follows from the arguments."""

    def __init__(self, weights: Sequence[float]):
        share = np.asarray(weights, dtype=np.float64)
        edges = np.cumsum(share) / share.sum() * BLOCK * _UNIT  # below 2**53: exact to a part of 2**-20 of a sample
        self._edges = np.concatenate([[0], np.rint(edges).astype(np.int64)])
        self._edges[-1] = BLOCK * _UNIT

    def before(self, block: int) -> np.ndarray:
        """int64[sets]: samples of each data set in the blocks 0 to `block` - 1."""
        whole, rest = self._edges >> _UNIT_BITS, self._edges & (_UNIT - 1)
        teeth, first = whole * block, 0
        for bit in reversed(range(block.bit_length())):  # blocks [first, first + 2**bit) are shifted evenly
            if block >> bit & 1:
                step = _UNIT >> bit
                teeth += np.clip((rest - _shift(first) + step - 1) // step, 0, 1 << bit)
                first += 1 << bit
        return np.diff(teeth)

    def counts(self, block: int) -> np.ndarray:
        """int64[sets]: samples of each data set in one block."""
        return np.diff((self._edges >> _UNIT_BITS) + (_shift(block) < (self._edges & (_UNIT - 1))))

    def assign(self, block: int, seed: int, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each of the block's samples, its data set, int64[BLOCK], and how many of that set the block had before it.

        `start` is the sample of the run that block 0 begins with.
        """
        ends = np.cumsum(self.counts(block))
        slots = permute(np.arange(BLOCK), BLOCK, order_key(seed, f"blend/{start}", block))
        sets = np.searchsorted(ends, slots, side="right")
        by_set = np.argsort(sets, kind="stable")
        ranks = np.empty(BLOCK, dtype=np.int64)
        ranks[by_set] = np.arange(BLOCK) - np.concatenate([[0], ends])[sets[by_set]]
        return sets, ranks


def _shift(block: int) -> int:
    """Van der Corput's sequence in units of 2**-32: the bits of the block number, mirrored."""
    return int(f"{block:0{_UNIT_BITS}b}"[::-1], 2)
