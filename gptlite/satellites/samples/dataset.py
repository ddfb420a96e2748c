"""Samples of a map-style dataset: opening, checks, order and loading.

N samples are ordered like N sequences of one token, so epochs, resuming and a change of the data-parallel degree follow
the rules of gptlite/data/stream.py. Random augmentation of the run's n-th sample is a function of the seed and n:
torch's, numpy's and Python's generators are seeded before each sample.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from gptlite.data.batch_loader import Batch, BatchLoader, Share, spread
from gptlite.data.batches import BatchSchedule
from gptlite.data.check import check_settings
from gptlite.data.config import DatasetConfig
from gptlite.data.opened import Identity, OpenedData, require_same
from gptlite.data.registry import source_of
from gptlite.data.stream import SampleStream
from gptlite.errors import ConfigError, first_line
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import together
from gptlite.satellites.samples.batch import SampleBatch, collated, read_sample, split


@dataclass(frozen=True)
class SampleSets(OpenedData):
    """Opened dataset of a run."""

    name: str
    train: Any
    validation: dict[str, Any]
    identity: Identity
    tokenizer: None = None

    def num_samples(self, sequence_length: int) -> int:
        """Number of training samples in an epoch. A sample counts as one position."""
        return len(self.train)

    def example(self) -> tuple[Any, Tensor]:
        """Return the input and the target of the first training sample, as a batch of one."""
        key = f"data={self.name}"
        return split(key, collated(self.train, [read_sample(key, self.train, 0)], key))

    def describe(self) -> str:
        """Return a one-line summary."""
        held_out = sum(len(each) for each in self.validation.values())
        classes = getattr(self.train, "classes", ())
        words = f", {len(classes)} classes" if classes else ""
        return f"{self.name}: {len(self.train):,} training and {held_out:,} held-out samples{words}"

    def loader(
        self, config: DatasetConfig, schedule: BatchSchedule, micro_batch_size: int, mesh: Mesh, seed: int
    ) -> SampleLoader:
        """Return this rank's loader of samples."""
        return SampleLoader(
            self,
            seed,
            schedule=schedule,
            micro_batch_size=micro_batch_size,
            device=mesh.device,
            share=Share(mesh.data_rank, mesh.data_size),
            workers=config.workers,
        )


def open_on_ranks(config: DatasetConfig, mesh: Mesh) -> SampleSets:
    """Return `open_samples` on each rank. All ranks of `mesh` must call this; an error on one is raised on all."""
    check_settings(config)
    data = together(mesh, lambda: open_samples(config))
    require_same(data.identity, mesh, f"data={data.name}: ranks opened different datasets")
    return data


def open_samples(config: DatasetConfig) -> SampleSets:
    """Open the dataset of a configuration.

    Raises ConfigError if it cannot be opened, is not map-style, has no samples, or has samples that are not tensors.
    """
    source = source_of(config)
    key = f"data={source.name}"
    try:
        opened = source.open(config)
    except ConfigError:
        raise
    except Exception as error:  # a plugin's function may raise anything
        raise ConfigError(f"{key}: opening it raised {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(opened, tuple | list) or len(opened) != 2:
        raise ConfigError(f"{key}: opening it returned {type(opened).__name__}; return (training, validation)")
    train, validation = opened
    sets = dict(validation) if isinstance(validation, Mapping) else {source.name: validation}
    for name, dataset in {"training": train, **sets}.items():
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise ConfigError(f"{key}: the {name} dataset, {type(dataset).__name__}, lacks __getitem__ or __len__")
        if len(dataset) < 1:
            raise ConfigError(f"{key}: the {name} dataset has length {len(dataset)}; it needs at least one sample")
        split(key, collated(dataset, [read_sample(key, dataset, 0)], key))
    about: Identity = {"corpus": source.name, "tokenizer": "none", "sequence_length": "1"}
    return SampleSets(source.name, train, sets, about | {"train": _digest(config, train)})


def _digest(config: DatasetConfig, dataset: Any) -> str:
    """Return the SHA-256 of a dataset's length and `fingerprint`.

    A dataset without a fingerprint is identified by the settings that its schema adds to DatasetConfig.
    """
    # Hugging Face's datasets have `_fingerprint`.
    fingerprint = getattr(dataset, "fingerprint", getattr(dataset, "_fingerprint", None))
    if fingerprint is None:
        common = set(DatasetConfig.__dataclass_fields__)
        fingerprint = sorted((key, value) for key, value in asdict(config).items() if key not in common)
    return hashlib.sha256(f"{len(dataset)} {fingerprint}".encode()).hexdigest()


@dataclass(frozen=True)
class _Seeded:
    """Dataset indexed by (n, index). Sample `index`, the run's n-th, is augmented as a function of the seed and n."""

    key: str
    dataset: Any
    seed: int

    def __getitem__(self, place: tuple[int, int]) -> Any:
        """Return a sample or its ConfigError. DataLoader would add a traceback to an error raised in a worker."""
        number, index = place
        digest = hashlib.sha256(f"{self.seed} sample {number}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8]) >> 1)
        np.random.seed(int.from_bytes(digest[8:12]))
        random.seed(digest)
        try:
            return read_sample(self.key, self.dataset, index)
        except ConfigError as error:
            return error

    def collate(self, samples: list[Any]) -> tuple[Any, Tensor] | ConfigError:
        """Return the input and the targets of a micro-batch, or the error of a sample."""
        try:
            if error := next((each for each in samples if isinstance(each, ConfigError)), None):
                return error
            return split(self.key, collated(self.dataset, samples, self.key))
        except ConfigError as error:
            return error

    def read(self, places: Sequence[tuple[int, int]]) -> tuple[Any, Tensor]:
        """Return the micro-batch of these samples. Raises ConfigError if one cannot be read."""
        with _own_generators():
            return raised(self.collate([self[place] for place in places]))


def raised(batch: tuple[Any, Tensor] | ConfigError) -> tuple[Any, Tensor]:
    """Return `batch`, or raise it if it is an error."""
    if isinstance(batch, ConfigError):
        raise batch
    return batch


class SampleLoader(BatchLoader):
    """Loader of a map-style dataset. `workers` processes prefetch samples.

    Without workers, this process reads samples between steps, and then restores its random generators.
    """

    def __init__(
        self,
        sets: SampleSets,
        seed: int,
        *,
        schedule: BatchSchedule,
        micro_batch_size: int,
        device: torch.device,
        share: Share,
        workers: int,
    ) -> None:
        # Only the length of these tokens is used; a chunk of one token represents a sample.
        tokens = np.broadcast_to(np.uint8(0), len(sets.train) + 1)
        stream = SampleStream.begin(seed, 1, {sets.name: (str(sets.identity["train"]), tokens, 1.0)})
        super().__init__(stream, schedule=schedule, micro_batch_size=micro_batch_size, device=device, share=share)
        self._sets, self._workers = sets, workers
        self._key = f"data={sets.name}"
        self._train = _Seeded(self._key, sets.train, seed)
        self._ready: tuple[object, list[SampleBatch]] | None = None
        self._reading: tuple[object, Iterator[tuple[Any, Tensor] | ConfigError]] | None = None

    def batch(self, consumed_samples: int, micro_index: int) -> Batch:
        key = self.schedule, self.stream, consumed_samples
        if self._ready is None or self._ready[0] != key:
            self._ready = key, self._read_samples(consumed_samples)
        return self._ready[1][micro_index].to(self._device)

    def _read_samples(self, consumed: int) -> list[SampleBatch]:
        if self._workers == 0:
            parts = [self._train.read(each) for each in self._places(consumed)]
        else:
            if self._reading is None or self._reading[0] != (self.schedule, self.stream, consumed):
                self._reading = (), self._start(consumed)  # also stops workers that read from another position
            parts = [raised(next(self._reading[1])) for _ in range(self.micro_batches(consumed))]
            self._reading = (self.schedule, self.stream, self.schedule.after(consumed)), self._reading[1]
        batches = [
            SampleBatch(x, targets, torch.tensor([number for number, _ in places]))
            for (x, targets), places in zip(parts, self._places(consumed), strict=True)
        ]
        return [batch.pin_memory() for batch in batches] if self._device.type == "cuda" else batches  # type: ignore[misc]

    def _start(self, consumed: int) -> Iterator[tuple[Any, Tensor] | ConfigError]:
        """Return an endless iterator over this rank's micro-batches after `consumed` samples, read by workers."""

        def places() -> Iterator[Sequence[tuple[int, int]]]:
            position = consumed
            while True:
                yield from self._places(position)
                position = self.schedule.after(position)

        loader = DataLoader(
            self._train,  # type: ignore[arg-type]
            batch_sampler=places(),  # type: ignore[arg-type]
            num_workers=self._workers,
            collate_fn=self._train.collate,
        )
        return iter(loader)

    def _places(self, consumed: int) -> list[list[tuple[int, int]]]:
        """Return, for each micro-batch of a step on this rank, the (n, index in the dataset) of its samples."""
        numbers = self._numbers(consumed)
        _, _, indices = self.stream.locate(numbers)
        return [list(zip(*each, strict=True)) for each in zip(numbers.tolist(), indices.tolist(), strict=True)]

    @property
    def validation_sets(self) -> list[str]:
        return list(self._sets.validation)

    def validation_batches(self, limit: int | None = None, name: str | None = None) -> Iterator[Batch]:
        """Yield this rank's batches, see BatchLoader. A rank with no samples left gets batches with `counted` False."""
        dataset = self._sets.validation[name or self.validation_sets[0]]
        numbers = spread(len(dataset), limit).tolist()
        seeded, size = _Seeded(self._key, dataset, self.stream.seed), self.micro_batch_size
        for start in range(0, len(numbers), self._samples_at_once):
            mine = numbers[start + self._share.rank * size :][:size]
            chosen = mine or numbers[:1]
            x, targets = seeded.read([(index, index) for index in chosen])
            yield SampleBatch(x, targets, torch.tensor(chosen), counted=bool(mine)).to(self._device)

    def _num_validation_samples(self, name: str) -> int:
        return len(self._sets.validation[name])

    def close(self) -> None:
        """Stop the workers."""
        self._reading = None


@contextmanager
def _own_generators() -> Iterator[None]:
    """Restore the states of torch's, numpy's and Python's random generators after the block."""
    arrays, numbers = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        np.random.set_state(arrays)
        random.setstate(numbers)
