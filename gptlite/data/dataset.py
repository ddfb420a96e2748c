"""Fixed chunks of a long row of tokens, and the order in which training reads them."""

import numpy as np

from gptlite.data.order import order_key, permute


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


class TrainSampler:
    """Which chunk the n-th training sample of a run is: a pure function of (seed, dataset, n).

    Epochs follow one another without a gap, each in an order of its own. The order does not depend on how long the
    run is, on the batch size or on the number of ranks.
    """

    def __init__(self, num_samples: int, seed: int, dataset: str):
        self._num_samples = num_samples
        self._seed = seed
        self._dataset = dataset

    def samples(self, first: int, count: int) -> np.ndarray:
        """int64[count]: chunks of samples first, first + 1, ..."""
        return self.chunks(np.arange(first, first + count))

    def chunks(self, numbers: np.ndarray) -> np.ndarray:
        """int64[N]: chunks of the samples with these numbers, int64[N]."""
        epochs, positions = np.divmod(numbers, self._num_samples)
        chunks = np.empty(len(numbers), dtype=np.int64)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            chunks[rows] = permute(positions[rows], self._num_samples, order_key(self._seed, self._dataset, int(epoch)))
        return chunks
