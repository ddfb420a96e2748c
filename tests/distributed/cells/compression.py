"""Runs with compressed gradients, on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.cells.steps import built
from gptlite.checkpoint.checkpointer import Checkpointer
from gptlite.checkpoint.config import CheckpointConfig
from gptlite.checkpoint.load import whole_tensors
from gptlite.checkpoint.manifest import read_manifest
from gptlite.config import Config
from gptlite.parallelism.boxes import local_tensor
from gptlite.satellites.compressed import build
from gptlite.satellites.compressed.buckets import Bucket
from gptlite.satellites.compressed.gradients import KEYS, CompressedReduction
from gptlite.satellites.compressed.powersgd import LowRankReduction
from gptlite.satellites.monitor.replicas import check_replicas, fingerprint


class Recording:
    """Keeps what goes into the compressed sums and what comes out, added up over all steps in float64."""

    def bind(self: Any, *args: Any) -> None:
        super().bind(*args)
        shapes = {bucket: (held.rows, sum(held.sizes)) for bucket, held in self._errors.items()}
        self.given = {bucket: torch.zeros(shape, dtype=torch.float64) for bucket, shape in shapes.items()}
        self.got = {bucket: torch.zeros(shape, dtype=torch.float64) for bucket, shape in shapes.items()}
        self.size = {bucket: torch.zeros(shape, dtype=torch.float64) for bucket, shape in shapes.items()}

    def _enters(self: Any, bucket: Bucket, flat: Tensor) -> None:
        self.given[bucket] += flat.view_as(self.given[bucket])
        self.size[bucket] += flat.view_as(self.given[bucket]).abs()

    def scatter(self: Any, bucket: Bucket, out: Tensor, flat: Tensor, group: dist.ProcessGroup) -> None:
        if self._replicas == 1:
            self._enters(bucket, flat)
        super().scatter(bucket, out, flat, group)
        if self._replicas == 1:
            self.got[bucket][group.rank()] += out

    def sum(self: Any, bucket: Bucket, flat: Tensor, group: dist.ProcessGroup) -> None:
        self._enters(bucket, flat)
        super().sum(bucket, flat, group)
        if group.rank() == 0:  # all ranks have the same
            self.got[bucket][0] += flat

    def worst(self: Any) -> float:
        """The largest |sum of inputs - sum of results - sum of errors| of a parameter, over the sum of |inputs|."""
        group, worst = self.mesh.group("dp_replicate" if self._replicas > 1 else "dp_shard"), 0.0
        for bucket, held in self._errors.items():
            values = self.given[bucket], self.got[bucket], self.size[bucket]
            parts = [each.split(held.sizes, 1) for each in values]
            for given, got, size, error in zip(*parts, held.views(held.values), strict=True):
                table = torch.stack([given - got - error.double(), size])
                dist.all_reduce(table, group=group)
                norm = table.flatten(1).norm(dim=1)
                if norm[1]:
                    worst = max(worst, float(norm[0] / norm[1]))
        return worst


class Recorded(Recording, CompressedReduction):
    """A run's sums with a codec."""


class RecordedLowRank(Recording, LowRankReduction):
    """A run's sums of low rank."""


@dataclass(frozen=True)
class Trained:
    """Losses of a rank, the worst of `Recorded`, and the bytes it sent and ought to have sent."""

    losses: list[float]
    worst: float
    sent: int
    planned: int


def train(config: Config, steps: int) -> Trained:
    """Trains, and compares the copies of parameters."""
    kinds = {"CompressedReduction": Recorded, "LowRankReduction": RecordedLowRank}
    with mock.patch.multiple(build, **kinds), built(config) as (mesh, state, step):
        losses = [step(state).loss for _ in range(steps)]
        check_replicas(state.named_parameters(), state.tied_names(), mesh, state.step)
        reduction = state.runner.mesh.reduction
        if reduction is None:
            return Trained(losses, 0.0, 0, 0)
        assert isinstance(reduction, Recording)
        passes = state.loader.num_micro_batches if config.parallelism.zero >= 2 else 1
        planned = steps * reduction.step_bytes(passes)[0]
        return Trained(losses, reduction.worst(), reduction.counted.sent, planned)


@dataclass(frozen=True)
class Continued:
    """Where a rank saved, the losses and the errors' hashes after the steps that followed, and notes on loading."""

    path: str
    losses: list[float]
    errors: dict[str, int]
    notes: list[str]


def go_on(config: Config, folder: str, source: str | None, steps: int, more: int) -> Continued:
    """Trains `steps` steps from a checkpoint, or from the start, saves, and trains `more` steps."""
    with built(config) as (_, state, step):
        mesh, notes = state.runner.mesh, []
        if source is not None:
            notes = state.load(Path(source), lambda _: None)
            state.load_meta(read_manifest(Path(source)).meta)
        for _ in range(steps):
            step(state)
        checkpointer = Checkpointer(CheckpointConfig(async_save=False), Path(folder), mesh)
        path = checkpointer.save(state.tensors(), state.meta(), "", None, lambda _: None)
        checkpointer.close()
        losses = [step(state).loss for _ in range(more)]
        errors = {} if mesh.reduction is None else mesh.reduction.tensors()
        hashes = {key: int(fingerprint(local_tensor(each))) for key, each in errors.items()}
        return Continued(str(path), losses, hashes, notes)


def error_sums(path: str) -> dict[str, Tensor]:
    """The sum of each parameter's errors in a checkpoint, in float64."""
    read, found = whole_tensors(Path(path), lambda _: None), {}
    for key in read_manifest(Path(path)).tensors:
        if key.startswith(KEYS):
            name = key.removeprefix(KEYS).partition(".")[2]
            found[name] = found.get(name, 0.0) + read(key).double()
    return found
