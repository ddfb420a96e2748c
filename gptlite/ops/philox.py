"""Counter-based generator Philox4x32-10 (Salmon et al., SC'11): random words as a pure function of a counter.

The words for a counter do not depend on the device or rank that draws them, or on the order of draws.
"""

from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
_ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int | Tensor]) -> tuple[Tensor, ...]:
    """Return four 32-bit random words, in int64 tensors, for each counter, under a key of two 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The 64-bit product may wrap into the sign bit. Its bits are right, and the masks drop the sign extension.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & WORD, (product1 >> 32) & WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & WORD, high0 ^ c3 ^ k1, product0 & WORD
        k0, k1 = (k0 + _WEYL[0]) & WORD, (k1 + _WEYL[1]) & WORD
    return c0, c1, c2, c3
