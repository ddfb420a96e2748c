"""Sums in two hops in float64, in numpy, written from the paper and not from the code under test."""

from __future__ import annotations

import numpy as np
from compressed.simulation import Array, rounded


def two_hops(codec: str, values: Array, node_size: int) -> Array:
    """Sums [row, blocks, width] of values [rank, row, blocks, width]; row r is that of rank r."""
    ranks = len(values)
    nodes = ranks // node_size
    sums = np.zeros(values.shape[1:])
    partial = {}  # of each node, of each row, on the rank of the node that has the row's place
    for node in range(nodes):
        for row in range(ranks):
            holder = node * node_size + row % node_size
            members = range(node * node_size, (node + 1) * node_size)
            sent = [values[rank, row] if rank == holder else rounded(codec, values[rank, row]) for rank in members]
            partial[node, row] = sum(sent)
    for row in range(ranks):
        for node in range(nodes):
            sums[row] += partial[node, row] if node == row // node_size else rounded(codec, partial[node, row])
    return sums
