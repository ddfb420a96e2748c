"""Batches that a program hands over: their split into micro-batches, and the loader that passes them on to the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from gptlite.data.batch_loader import Batch, BatchLoader
from gptlite.data.batches import BatchSchedule
from gptlite.data.samples import SampleBatch, split
from gptlite.data.stream import SampleStream
from gptlite.errors import ConfigError
from gptlite.parallelism.collectives import all_reduce
from gptlite.parallelism.mesh import Mesh


class HandedOver(BatchLoader):
    """Loader of one step's micro-batches, without validation. The sizes of the global batches are those given to
    `take`."""

    def __init__(self, seed: int, device: torch.device) -> None:
        nothing = SampleStream.begin(seed, 1, {"batches": ("", np.zeros(2, np.uint8), 1.0)})
        super().__init__(nothing, schedule=BatchSchedule(1), micro_batch_size=1, device=device)
        self._batches: Sequence[SampleBatch] = ()

    def take(self, batches: Sequence[SampleBatch], samples: int) -> None:
        """Set this rank's micro-batches of the next step, and the number of samples of all ranks."""
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
        """No data sets."""
        return []

    def validation_batches(self, limit: int | None = None, name: str | None = None) -> Iterator[Batch]:
        """Return no batches."""
        return iter(())

    def _num_validation_samples(self, name: str) -> int:
        return 0


def micro_batches(batch: Any, size: int | None) -> list[SampleBatch]:
    """Return a batch in micro-batches of `size` samples, the last of which may have fewer; None: in one.

    A list of tuples, lists or dicts is a list of batches. Raises ConfigError if there is no target, or if the first
    dims of the tensors differ.
    """
    several = isinstance(batch, list) and not any(isinstance(each, Tensor) for each in batch)
    found: list[SampleBatch] = []
    for each in batch if several else [batch]:
        x, targets = split("batch", each)
        sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in tree_leaves((x, targets))}
        if len(sizes) != 1 or 0 in sizes:
            raise ConfigError(
                f"batch: the tensors have {', '.join(map(str, sorted(sizes)))} samples; all need the same first dim, "
                "at least 1"
            )
        (total,) = sizes
        for start in range(0, total, size or total):
            rows = slice(start, start + (size or total))
            mine, theirs = tree_map(lambda leaf, rows=rows: leaf[rows], (x, targets))
            found.append(SampleBatch(mine, theirs, torch.arange(len(theirs))))
    if not found:
        raise ConfigError("batch: an empty list; give (input, target), a dict of tensors, or a list of those")
    return found


def agreed_samples(batches: Sequence[SampleBatch], mesh: Mesh) -> int:
    """Return the number of samples of all data ranks. Raises ConfigError, on all ranks, if their numbers of
    micro-batches differ. Collective."""
    count, samples = len(batches), sum(len(batch.targets) for batch in batches)
    sums = torch.tensor([count, count**2, samples], dtype=torch.int64, device=mesh.device)
    counts, squares, total = all_reduce(sums, mesh).tolist()
    if mesh.world_size * squares != counts**2:  # equal only without variance
        raise ConfigError(f"batch: {count} micro-batches on rank {mesh.rank}, and others elsewhere; "
                          "give every rank the same number")  # fmt: skip
    return total * mesh.data_size // mesh.world_size


def in_step(batches: Iterable[SampleBatch], mesh: Mesh) -> Iterator[Batch]:
    """Yield this rank's batches on its device, then its last one, not counted, until all ranks are through.

    Raises ConfigError on a rank that has none while others have. Collective.
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
            raise ConfigError(f"batches: rank {mesh.rank} has none, and other ranks have; give each at least one")
        yield last
