"""Fixed chunks of a long row of tokens."""

import numpy as np


class TokenDataset:
    """Chunk j is tokens [jL, jL + L] of `tokens`, int[N]: L inputs, and L targets one further on.

    Neighbouring chunks share one token, so every token but the first is a target exactly once.
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int):
        self.tokens = tokens
        self.sequence_length = sequence_length

    @property
    def num_targets(self) -> int:
        """Tokens that have one before them to be predicted from: N - 1."""
        return max(len(self.tokens) - 1, 0)

    @property
    def num_samples(self) -> int:
        """Chunks with L targets."""
        return self.num_targets // self.sequence_length

    @property
    def num_chunks(self) -> int:
        """All chunks, a short last one included."""
        return -(-self.num_targets // self.sequence_length)

    def __getitem__(self, index: int) -> np.ndarray:
        """int64[L + 1], or fewer for a short last chunk. IndexError outside range(num_chunks)."""
        if not 0 <= index < self.num_chunks:
            raise IndexError(f"chunk {index} of {self.num_chunks}")
        start = index * self.sequence_length
        return self.tokens[start : start + self.sequence_length + 1].astype(np.int64)
