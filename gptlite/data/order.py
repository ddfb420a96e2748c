"""The order of training samples: a pseudo-random permutation that is computed, not stored.

A Feistel network is a bijection on b-bit numbers for any round function. Repeated until the result falls below `size`
("cycle walking": Black and Rogaway 2002, Ciphers with Arbitrary Finite Domains), it permutes range(size). b is the
smallest width that holds `size`, so fewer than two applications are needed on average. Any position of any epoch is
computed without the positions before it.
"""

import hashlib

import numpy as np

_ROUNDS = 8
_MIN_BITS = 2  # each half needs at least one bit, or nothing would be mixed


def order_key(seed: int, dataset: str, epoch: int) -> np.ndarray:
    """Return round keys, uint64[8], that give a different permutation for every (seed, dataset, epoch)."""
    digest = hashlib.blake2b(f"{seed}/{dataset}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def permute(index: int | np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Return the image of each index under a permutation of range(size): int64, shaped like `index`.

    Raises IndexError for an index outside range(size).
    """
    value = np.atleast_1d(np.asarray(index, dtype=np.int64))
    if value.size and (value.min() < 0 or value.max() >= size):
        raise IndexError(f"index outside range({size})")
    bits = max(_MIN_BITS, (size - 1).bit_length())
    value = _feistel(value.astype(np.uint64), bits, key)
    while (outside := value >= size).any():  # cycles return to range(size), so this ends and is a bijection
        value[outside] = _feistel(value[outside], bits, key)
    return value.astype(np.int64).reshape(np.shape(index))


def _feistel(value: np.ndarray, bits: int, key: np.ndarray) -> np.ndarray:
    # With an odd number of bits the halves differ by one bit, so their widths swap together with them in every round.
    left_bits, right_bits = bits // 2, bits - bits // 2
    left, right = value >> np.uint64(right_bits), value & _mask(right_bits)
    for round_key in key:
        left, right = right, left ^ (_mix(right ^ round_key) & _mask(left_bits))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


def _mix(value: np.ndarray) -> np.ndarray:
    # Variant 13 of Stafford's 64-bit mixers, the finalizer of SplitMix64: every input bit reaches every output bit.
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)
