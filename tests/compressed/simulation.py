"""Compressed sums of W workers in float64, in numpy, written from the papers and not from the code under test."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def rounded(codec: str, values: Array, keep: NDArray[np.bool_] | None = None) -> Array:
    """What a receiver reads of blocks [blocks, width]; `keep`: False for values that are always zero."""
    if codec == "bf16":  # 8 bits of mantissa, to nearest even
        mantissa, exponent = np.frexp(values)
        return np.ldexp(np.rint(mantissa * 256) / 256, exponent)
    if codec == "sign":
        keep = np.ones(values.shape, bool) if keep is None else keep
        counts = np.maximum(keep.sum(1, keepdims=True), 1)
        means = np.abs(values * keep).sum(1, keepdims=True) / counts
        return np.where(keep, np.where(values < 0, -means, means), 0.0)
    most = {"int8": 127, "int4": 7}[codec]
    scales = np.abs(values).max(1, keepdims=True) / most
    return np.rint(values / np.where(scales == 0, 1, scales)) * scales


class Workers:
    """W workers; `errors` [worker, chunk, blocks, width]."""

    def __init__(self, codec: str, workers: int, blocks: int, width: int) -> None:
        self.codec, self.workers = codec, workers
        self.errors = np.zeros((workers, workers, blocks, width))

    def reduce_scatter(self, values: Array, keep: NDArray[np.bool_] | None = None) -> Array:
        """Sums [chunk, blocks, width] of values [worker, chunk, blocks, width]. `keep` [chunk, blocks, width]."""
        values = values + self.errors
        sums = np.zeros(values.shape[1:])
        for worker in range(self.workers):
            for chunk in range(self.workers):
                sent = values[worker, chunk]
                if chunk != worker:
                    sent = rounded(self.codec, sent, None if keep is None else keep[chunk])
                self.errors[worker, chunk] = values[worker, chunk] - sent
                sums[chunk] += sent
        return sums

    def all_reduce(self, values: Array, keep: NDArray[np.bool_] | None = None) -> Array:
        """The sums that every worker ends with."""
        sums = self.reduce_scatter(values, keep)
        for chunk in range(self.workers if self.workers > 1 else 0):
            sent = rounded(self.codec, sums[chunk], None if keep is None else keep[chunk])
            self.errors[chunk, chunk] = sums[chunk] - sent
            sums[chunk] = sent
        return sums
