"""Batches that a program passes to an engine: division into micro-batches, and the loader of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptlite.data.batch_loader import Batch, BatchLoader
from gptlite.data.batches import BatchSchedule
from gptlite.data.stream import SampleStream
from gptlite.errors import ConfigError
from gptlite.parallelism.collectives import all_reduce
from gptlite.parallelism.mesh import Mesh
from gptlite.progress import counted
from gptlite.satellites.samples.batch import SampleBatch, split
from gptlite.torch_private.ops import tree_leaves, tree_map


class HandedOver(BatchLoader):
    """Loader of one step's micro-batches, without validation data. `take` sets the size of the global batch."""

    def __init__(self, seed: int, device: torch.device) -> None:
        nothing = SampleStream.begin(seed, 1, {"batches": ("", np.zeros(2, np.uint8), 1.0)})
        super().__init__(nothing, schedule=BatchSchedule(1), micro_batch_size=1, device=device)
        self._batches: Sequence[SampleBatch] = ()

    def take(self, batches: Sequence[SampleBatch], samples: int) -> None:
        """Set this rank's micro-batches of the next step, and the number of samples in the global batch."""
        self._batches, self.schedule = batches, replace(self.schedule, global_batch_size=samples)

    def micro_batches(self, consumed_samples: int) -> int:
        """Return the number of micro-batches of the step."""
        return len(self._batches)

    def batch(self, consumed_samples: int, micro_index: int) -> Batch:
        """Return a micro-batch of the step."""
        return self._batches[micro_index].to(self._device)

    def close(self) -> None:
        """Drop the batches."""
        self._batches = ()

    @property
    def validation_sets(self) -> list[str]:
        """Names of the validation sets: none."""
        return []

    def validation_batches(self, limit: int | None = None, name: str | None = None) -> Iterator[Batch]:
        """Return no batches."""
        return iter(())

    def _num_validation_samples(self, name: str) -> int:
        return 0


def micro_batches(batch: Any, size: int | None) -> list[SampleBatch]:
    """Split a batch into micro-batches of `size` samples, of which the last may have fewer. If `size` is None, do not
    split it.

    A list of tuples, lists or dicts is a list of batches, each of which is split. Raises ConfigError if there is no
    target, or if the first dims of the tensors differ.
    """
    several = isinstance(batch, list) and not any(isinstance(each, Tensor) for each in batch)
    parts: list[SampleBatch] = []
    for each in batch if several else [batch]:
        x, targets = split("batch", each)
        sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in tree_leaves((x, targets))}
        if len(sizes) != 1 or 0 in sizes:
            raise ConfigError(
                f"batch: the first dims of the tensors are {', '.join(map(str, sorted(sizes)))}; "
                "all tensors need the same first dim, the number of samples, which is at least 1"
            )
        (total,) = sizes
        for start in range(0, total, size or total):
            rows = slice(start, start + (size or total))
            mine, theirs = tree_map(lambda leaf, rows=rows: leaf[rows], (x, targets))
            parts.append(SampleBatch(mine, theirs, torch.arange(len(theirs))))
    if not parts:
        raise ConfigError("batch: the list is empty; give (input, target), a dict of tensors, or a list of these")
    return parts


def agreed_samples(batches: Sequence[SampleBatch], mesh: Mesh) -> int:
    """Return the total number of samples over all data ranks. Raises ConfigError, on all ranks, if the ranks have
    different numbers of micro-batches. Collective."""
    count, samples = len(batches), sum(len(batch.targets) for batch in batches)
    sums = torch.tensor([count, count**2, samples], dtype=torch.int64, device=mesh.device)
    counts, squares, total = all_reduce(sums, mesh).tolist()
    if mesh.world_size * squares != counts**2:  # the variance of the counts is not 0
        raise ConfigError(
            f"batch: rank {mesh.rank} has {counted(count, 'micro-batch')}, but the ranks do not all have the same "
            "number; give every rank the same number"
        )
    return total * mesh.data_size // mesh.world_size


def in_step(batches: Iterable[SampleBatch], mesh: Mesh) -> Iterator[Batch]:
    """Yield this rank's batches on its device. After the last batch, yield it again, marked as not counted, until
    every rank has yielded all of its batches.

    Raises ConfigError on a rank that has no batch while other ranks have some. Collective.
    """
    last: Batch | None = None
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        if not all_reduce(torch.tensor(int(batch is not None), device=mesh.device), mesh).item():
            return
        if batch is not None:
            last = batch.to(mesh.device)
        elif last is not None:
            last = replace(last, counted=False)
        else:
            raise ConfigError(
                f"batches: rank {mesh.rank} has no batch, but other ranks have; give every rank at least one"
            )
        yield last
