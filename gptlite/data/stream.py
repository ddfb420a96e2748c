"""The endless row of a run's training samples: sample n is a pure function of the seed, the eras and n.

Nothing is stored and nothing is counted up: any sample is found from its number alone, so a run is resumed by one
integer, on any number of ranks.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from gptlite.data.blend import BLOCK, BlendPlan
from gptlite.data.eras import DataSet, Era
from gptlite.data.order import order_key, permute

_WINDOW = 8192  # samples located at a time: numpy's overhead for few is that for many


class SampleStream:
    """The samples of `eras`, drawn from `tokens`, int[N] by name of the data set; without them it tells places alone.

    Epochs of a data set follow one another without a gap, each in an order of its own. The order does not depend on how
    long the run is, on the batch size or on the number of ranks.
    """

    def __init__(self, seed: int, eras: Sequence[Era], tokens: Mapping[str, np.ndarray] | None = None):
        self.seed = seed
        self.eras = tuple(eras)
        self.names = list(dict.fromkeys(name for era in eras for name in era.sets))
        self._tokens = tokens or {}
        self._starts = np.array([era.start for era in eras])
        self._plans = [BlendPlan([each.weight for each in era.active.values()]) for era in eras]
        # Of a blend, whose blocks are worked out whole: two, since a batch may lie across their border.
        self._assigned = lru_cache(maxsize=2)(self._assign)
        self._located = lru_cache(maxsize=2)(self._locate_window)

    @classmethod
    def begin(
        cls, seed: int, sequence_length: int, sets: Mapping[str, tuple[str, np.ndarray, float]]
    ) -> "SampleStream":
        """A new run's, of (the data's SHA-256, its tokens, its weight) by name."""
        total = math.fsum(weight for _, _, weight in sets.values())
        parts = {name: DataSet(data, len(tokens), weight / total) for name, (data, tokens, weight) in sets.items()}
        tokens = {name: tokens for name, (_, tokens, _) in sets.items()}
        return cls(seed, [Era(0, sequence_length, parts)], tokens)

    def resumed(self, history: Sequence[Era], consumed: int) -> "SampleStream":
        """The stream that goes on after `consumed` samples of `history`, from then on as this one's last era says."""
        new = self.eras[-1]
        eras = [era.renamed(new.sets) for era in history if era.start < consumed]  # one without a sample is none
        if not eras:
            return SampleStream(self.seed, [new], self._tokens)
        if not new.like(eras[-1]):
            eras.append(eras[-1].after(consumed, SampleStream(self.seed, eras).counts(consumed), new))
        return SampleStream(self.seed, eras, self._tokens)

    def counts(self, sample: int) -> dict[str, int]:
        """How many samples of each data set the era that `sample` is in, or the last, has before it."""
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
        """Where samples, int64[N], are: data set (of `names`), epoch, and chunk j, tokens [jL, jL + L] of the set.

        Three arrays of int64[N]. L is the sequence length of the sample's era. IndexError for a number below 0.
        """
        samples = np.asarray(samples, dtype=np.int64)
        if samples.size and samples.min() < 0:
            raise IndexError(f"sample {samples.min()} is below 0")
        found = np.empty((3, *samples.shape), dtype=np.int64)
        in_era = np.searchsorted(self._starts, samples, side="right") - 1
        for index in np.unique(in_era):
            rows = in_era == index
            found[:, rows] = self._locate_in(int(index), samples[rows])
        return found[0], found[1], found[2]

    def read(self, samples: np.ndarray) -> np.ndarray:
        """Tokens of samples, int64[N], in the data's own type: [N, L + 1], L inputs and as many targets one further on.

        ValueError for samples of several lengths.
        """
        first, last = (int(np.searchsorted(self._starts, n, side="right")) - 1 for n in (samples.min(), samples.max()))
        length = self.eras[last].sequence_length
        if any(era.sequence_length != length for era in self.eras[first:last]):
            raise ValueError(f"samples {samples.min()} to {samples.max()} have different lengths")
        sets, chunks = self._places(samples)
        drawn = [int(sets[0])] if (sets == sets[0]).all() else np.unique(sets).tolist()
        if len(drawn) == 1:
            return gather(self._tokens[self.names[drawn[0]]], chunks, length)
        parts = [gather(self._tokens[self.names[each]], chunks[sets == each], length) for each in drawn]
        result = np.empty((len(samples), length + 1), dtype=np.result_type(*parts))
        for each, part in zip(drawn, parts, strict=True):
            result[sets == each] = part
        return result

    def _places(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Data sets and chunks of samples; near ones are remembered together."""
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
        """int64[3, N]: set, epoch and chunk of samples that all are of one era."""
        era = self.eras[index]
        active, places = list(era.active.items()), samples - era.start
        if len(active) == 1:
            sets, counts = np.zeros_like(samples), places
        else:
            sets, counts = self._draw(index, places)
        found = np.empty((3, len(samples)), dtype=np.int64)
        for number in np.unique(sets):
            name, each = active[number]
            rows = sets == number
            found[0, rows] = self.names.index(name)
            found[1:, rows] = self._order(each, counts[rows], era.sequence_length)
        return found

    def _draw(self, index: int, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of samples of a blend, by place in the era: which active set, and how many of its samples came before."""
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

    def _order(self, each: DataSet, counts: np.ndarray, length: int) -> np.ndarray:
        """int64[2, N]: epoch and chunk of a set's samples, numbered from the era's beginning."""
        size = each.num_samples(length)
        epochs, positions = np.divmod(counts + each.position, size)
        chunks = np.empty_like(counts)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            chunks[rows] = permute(positions[rows], size, order_key(self.seed, each.data, each.epoch + int(epoch)))
        return np.stack([epochs + each.epoch, chunks])


def num_chunks(tokens: np.ndarray, length: int) -> int:
    """Chunks of a row of tokens, a short last one included."""
    return -(-max(len(tokens) - 1, 0) // length)


def read_chunk(tokens: np.ndarray, chunk: int, length: int) -> np.ndarray:
    """int64[L + 1], or fewer for a short last chunk: tokens [jL, jL + L], L inputs and L targets one further on.

    Neighbouring chunks share one token, so every token but the first is a target exactly once.
    """
    return tokens[chunk * length : (chunk + 1) * length + 1].astype(np.int64)


def gather(tokens: np.ndarray, chunks: np.ndarray, length: int) -> np.ndarray:
    """Chunks, int64[N]: tokens [jL, jL + L] of the row `tokens` for each j, one below the other: [N, L + 1].

    IndexError for a chunk that the tokens do not have whole.
    """
    # Every stretch of L + 1 tokens, as a view: numpy copies N of them at once, and checks that they are there.
    row = np.asarray(tokens)
    shape = (max(len(row) - length, 0), length + 1)
    stretches = np.ndarray(shape, row.dtype, buffer=row, strides=row.strides * 2)
    return stretches[chunks * length]
