"""Eras of a run: spans of samples with constant data sets, weights and sequence length.

Together with the seed, the eras determine the n-th sample of a run. If the data sets, their weights or the sequence
length change when a run resumes, a new era begins at the next sample. Earlier eras do not change, so a sample number
always identifies the same sample.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from gptlite.documents import Between, Count, DocumentError, Size, checked


@dataclass(frozen=True)
class DataSet:
    """Data set, as used in one era.

    `data`, the SHA-256 of its tokens, is the key of the sample order, so moving a folder does not change the order.
    `weight` is the set's fraction of the samples; it is 0 if an earlier era read the set and this era does not. The era
    begins in `epoch` of the set, after `position` samples of that epoch.
    """

    data: str
    tokens: Count
    weight: Annotated[float, Between(0, 1)]
    epoch: Count = 0
    position: Count = 0

    def num_samples(self, sequence_length: int) -> int:
        """Number of samples in an epoch."""
        return max(self.tokens - 1, 0) // sequence_length


@dataclass(frozen=True)
class Era:
    """Span of a run from sample `start` on: samples of `sequence_length` tokens from `sets`, {name: data set}."""

    start: Count
    sequence_length: Size
    sets: dict[str, DataSet]

    @property
    def active(self) -> dict[str, DataSet]:
        """Sets with a weight above 0."""
        return {name: each for name, each in self.sets.items() if each.weight > 0}

    def like(self, other: "Era") -> bool:
        """Return True if both eras have the same data, weights and sequence length, so that no new era is needed."""
        if self.sequence_length != other.sequence_length:
            return False
        mine, theirs = ({each.data: each.weight for each in era.active.values()} for era in (self, other))
        # Weights are normalized by division, and the same ratios may round differently.
        return mine.keys() == theirs.keys() and all(math.isclose(mine[d], theirs[d], rel_tol=1e-9) for d in mine)

    def after(self, sample: int, counts: Mapping[str, int], new: "Era") -> "Era":
        """Return the era that follows this one from `sample` on, with the settings of `new`.

        `counts` is {name: samples read in this era}. Each set continues with its next sample. If the sequence length
        changes, chunks are cut differently, so a set in the middle of an epoch starts its next epoch instead.
        """
        ended = {each.data: self._moved(each, counts.get(name, 0), new) for name, each in self.sets.items()}
        sets = {}
        for name, each in new.sets.items():
            was = ended.pop(each.data, each)
            sets[name] = replace(each, epoch=was.epoch, position=was.position)
        gone = {name: ended[each.data] for name, each in self.sets.items() if each.data in ended}
        era = Era(sample, new.sequence_length, gone).renamed(sets)
        return replace(era, sets=sets | era.sets)

    def renamed(self, sets: Mapping[str, DataSet]) -> "Era":
        """Return this era with data sets renamed as in `sets`, matched by hash, since folders may have moved."""
        names = {each.data: name for name, each in sets.items()}
        old = {name: f"{name} (was)" for name in sets}
        return replace(self, sets={names.get(each.data, old.get(n, n)): each for n, each in self.sets.items()})

    def _moved(self, data_set: DataSet, count: int, new: "Era") -> DataSet:
        """Return the set with weight 0, at the position where `new` continues it after `count` samples of this era."""
        if not (samples := data_set.num_samples(self.sequence_length)):
            return replace(data_set, weight=0.0)
        epochs, position = divmod(data_set.position + count, samples)
        epoch = data_set.epoch + epochs
        if new.sequence_length != self.sequence_length and position:  # no chunk of the new length starts there
            epoch, position = epoch + 1, 0
        return replace(data_set, weight=0.0, epoch=epoch, position=position)

    def to_json(self) -> dict[str, Any]:
        """Return the era as a JSON-compatible dict for `from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(row: dict[str, Any]) -> "Era":
        """Return the era from a dict made by `to_json`. Raises DocumentError for another one."""
        return checked(row, Era)

    def describe(self) -> str:
        """Return e.g. `sequences of 512: data/web 0.7 from epoch 0, sample 9100; data/code 0.3 from epoch 2`."""
        parts = []
        for name, each in self.active.items():
            weight = f" {each.weight:g}" if len(self.active) > 1 else ""
            place = f", sample {each.position}" if each.position else ""
            parts.append(f"{name}{weight} from epoch {each.epoch}{place}")
        return f"sequences of {self.sequence_length}: {'; '.join(parts)}"


def check_eras(eras: Sequence[Era], key: str) -> None:
    """Raise DocumentError unless the eras follow each other from sample 0, and each reads samples."""
    for n, era in enumerate(eras):
        if era.start < (eras[n - 1].start if n else 0) or (n == 0 and era.start):
            raise DocumentError(f"{key}[{n}].start is {era.start}, which does not follow the era before")
        if not era.active or not math.isclose(sum(each.weight for each in era.active.values()), 1, rel_tol=1e-6):
            raise DocumentError(f"{key}[{n}].sets has weights whose sum is not 1")
        for name, each in era.active.items():
            if each.position > each.tokens:
                raise DocumentError(f"{key}[{n}].sets: {name} has the position {each.position}, beyond its last sample")
    if not eras:
        raise DocumentError(f"{key} is empty")
