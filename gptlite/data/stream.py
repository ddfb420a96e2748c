"""The infinite stream of a run's training samples: sample n is a pure function of the seed, the eras and n.

The stream has no stored order and no counters. Any sample is located by its number alone, so one integer is enough to
resume a run on any number of ranks.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from gptlite.data.blend import BLOCK, BlendPlan
from gptlite.data.eras import DataSet, Era
from gptlite.data.order import order_key, permute

_WINDOW = 8192  # samples located at a time, since numpy's overhead per call is the same for fewer


class SampleStream:
    """Samples of `eras`, drawn from `tokens`, {data set: int[N]}. Without tokens, samples can be located but not read.

    Epochs of a data set follow each other without a gap, each in a different order. The order does not depend on the
    length of the run, the batch size or the number of ranks.
    """

    def __init__(self, seed: int, eras: Sequence[Era], tokens: Mapping[str, np.ndarray] | None = None):
        self.seed = seed
        self.eras = tuple(eras)
        self.names = list(dict.fromkeys(name for era in eras for name in era.sets))
        self._tokens = tokens or {}
        self._starts = np.array([era.start for era in eras])
        self._plans = [BlendPlan([each.weight for each in era.active.values()]) for era in eras]
        # Blocks of a blend are computed whole. Two are cached, since a batch may cross their boundary.
        self._assigned = lru_cache(maxsize=2)(self._assign)
        self._located = lru_cache(maxsize=2)(self._locate_window)

    @classmethod
    def begin(
        cls, seed: int, sequence_length: int, sets: Mapping[str, tuple[str, np.ndarray, float]]
    ) -> "SampleStream":
        """Return the stream of a new run. `sets` is {name: (SHA-256 of the data, tokens, weight)}."""
        # The sum is exact, and so independent of the order of the data sets.
        total = math.fsum(weight for _, _, weight in sets.values())
        parts = {name: DataSet(data, len(tokens), weight / total) for name, (data, tokens, weight) in sets.items()}
        tokens = {name: tokens for name, (_, tokens, _) in sets.items()}
        return cls(seed, [Era(0, sequence_length, parts)], tokens)

    def resumed(self, history: Sequence[Era], consumed: int) -> "SampleStream":
        """Return a stream that follows the eras `history` for `consumed` samples, then this stream's last era."""
        new = self.eras[-1]
        eras = [era.renamed(new.sets) for era in history if era.start < consumed]  # eras without samples are dropped
        if not eras:
            return SampleStream(self.seed, [new], self._tokens)
        if not new.like(eras[-1]):  # otherwise the last era continues
            eras.append(eras[-1].after(consumed, SampleStream(self.seed, eras).counts(consumed), new))
        return SampleStream(self.seed, eras, self._tokens)

    def counts(self, sample: int) -> dict[str, int]:
        """Return {data set: number of its samples before `sample`}, counted from the start of the era of `sample`."""
        index = int(np.searchsorted(self._starts, sample, side="right")) - 1
        era = self.eras[index]
        if len(era.active) == 1:
            return dict.fromkeys(era.active, sample - era.start)
        block, place = divmod(sample - era.start, BLOCK)
        counts = self._plans[index].before(block)
        if place:
            counts = counts + np.bincount(self._assigned(index, block)[0][:place], minlength=len(counts))
        return dict(zip(era.active, counts.tolist(), strict=True))

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the data set (index in `names`), the epoch and the chunk number of each sample: three int64[N] arrays.

        Chunk j is tokens jL to jL + L of the set, for the era's sequence length L. Raises IndexError for a negative
        sample number.
        """
        samples = np.asarray(samples, dtype=np.int64)
        if samples.size and samples.min() < 0:
            raise IndexError(f"sample {samples.min()} is below 0")
        locations = np.empty((3, *samples.shape), dtype=np.int64)
        in_era = np.searchsorted(self._starts, samples, side="right") - 1
        for index in np.unique(in_era):
            rows = in_era == index
            locations[:, rows] = self._locate_in(int(index), samples[rows])
        return locations[0], locations[1], locations[2]

    def read(self, samples: np.ndarray) -> np.ndarray:
        """Return the tokens of `samples`, int64[N]: [N, L + 1] in the data's dtype, for L inputs and L shifted targets.

        Raises ValueError for samples of different lengths.
        """
        first, last = (int(np.searchsorted(self._starts, n, side="right")) - 1 for n in (samples.min(), samples.max()))
        length = self.eras[last].sequence_length
        if any(era.sequence_length != length for era in self.eras[first:last]):
            raise ValueError(f"samples {samples.min()} to {samples.max()} have different lengths")
        sets, chunks = self._places(samples)
        drawn = np.unique(sets).tolist()
        parts = [read_chunks(self._tokens[self.names[each]], chunks[sets == each], length) for each in drawn]
        if len(parts) == 1:
            return parts[0]
        result = np.empty((len(samples), length + 1), dtype=np.result_type(*parts))  # sets may differ in dtype
        for each, part in zip(drawn, parts, strict=True):
            result[sets == each] = part
        return result

    def _places(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the data set and the chunk of each sample, from a cache of windows of samples."""
        windows, places = np.divmod(samples, _WINDOW)
        sets, chunks = np.empty_like(samples), np.empty_like(samples)
        for window in np.unique(windows).tolist():
            rows = windows == window
            sets[rows], chunks[rows] = (part[places[rows]] for part in self._located(window))
        return sets, chunks

    def _locate_window(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        sets, _, chunks = self.locate(np.arange(window * _WINDOW, (window + 1) * _WINDOW))
        return sets, chunks

    def _locate_in(self, index: int, samples: np.ndarray) -> np.ndarray:
        """Return set, epoch and chunk of samples that all belong to one era: int64[3, N]."""
        era = self.eras[index]
        active, places = list(era.active.items()), samples - era.start
        if len(active) == 1:
            sets, counts = np.zeros_like(samples), places
        else:
            sets, counts = self._draw(index, places)
        locations = np.empty((3, len(samples)), dtype=np.int64)
        for number in np.unique(sets):
            name, each = active[number]
            rows = sets == number
            locations[0, rows] = self.names.index(name)
            locations[1:, rows] = self._order(each, counts[rows], era.sequence_length)
        return locations

    def _draw(self, index: int, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the active set of each sample, and the number of that set's earlier samples in the era.

        `places` are sample numbers counted from the start of the era.
        """
        blocks, within = np.divmod(places, BLOCK)
        sets, counts = np.empty_like(places), np.empty_like(places)
        for block in np.unique(blocks):
            rows = blocks == block
            assigned, ranks = self._assigned(index, int(block))
            sets[rows] = assigned[within[rows]]
            counts[rows] = ranks[within[rows]] + self._plans[index].before(int(block))[sets[rows]]
        return sets, counts

    def _assign(self, index: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        return self._plans[index].assign(block, self.seed, self.eras[index].start)

    def _order(self, data_set: DataSet, counts: np.ndarray, length: int) -> np.ndarray:
        """Return the epoch and chunk of samples of a set: int64[2, N].

        `counts` are the numbers of earlier samples of the set in the era.
        """
        size = data_set.num_samples(length)
        epochs, positions = np.divmod(counts + data_set.position, size)
        chunks = np.empty_like(counts)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            chunks[rows] = permute(
                positions[rows], size, order_key(self.seed, data_set.data, data_set.epoch + int(epoch))
            )
        return np.stack([epochs + data_set.epoch, chunks])


def num_chunks(tokens: np.ndarray, length: int) -> int:
    """Return the number of chunks in an array of tokens, including a short last one."""
    return -(-max(len(tokens) - 1, 0) // length)


def read_chunk(tokens: np.ndarray, chunk: int, length: int) -> np.ndarray:
    """Return tokens jL to jL + L for j = `chunk` and L = `length`: int64[L + 1], or fewer at the end of `tokens`.

    These are L inputs and L targets shifted by one. Neighbouring chunks share one token, so every token but the first
    is a target exactly once.
    """
    return tokens[chunk * length : (chunk + 1) * length + 1].astype(np.int64)


def read_chunks(tokens: np.ndarray, chunks: np.ndarray, length: int) -> np.ndarray:
    """Return tokens jL to jL + L for each chunk j of `chunks`, int64[N], as rows: [N, L + 1].

    Raises IndexError for an incomplete chunk.
    """
    # A view of every window of L + 1 tokens: numpy copies N of them in one call, and checks the bounds.
    row = np.asarray(tokens)
    shape = (max(len(row) - length, 0), length + 1)
    stretches = np.ndarray(shape, row.dtype, buffer=row, strides=row.strides * 2)
    return stretches[chunks * length]
