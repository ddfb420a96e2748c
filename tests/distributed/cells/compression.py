"""Runs with compressed gradients, on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
from gptlite.config import Config
from gptlite.satellites.compressed import build
from gptlite.satellites.compressed.buckets import Bucket
from gptlite.satellites.compressed.gradients import CompressedReduction
from gptlite.satellites.monitor.replicas import check_replicas
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import Step


class Recorded(CompressedReduction):
    """Keeps what goes into the compressed sums and what comes out, added up over all steps in float64."""

    def bind(self, *args: Any) -> None:
        super().bind(*args)
        shapes = {bucket: (held.rows, sum(held.sizes)) for bucket, held in self._errors.items()}
        self.given = {bucket: torch.zeros(shape, dtype=torch.float64) for bucket, shape in shapes.items()}
        self.got = {bucket: torch.zeros(shape, dtype=torch.float64) for bucket, shape in shapes.items()}
        self.size = {bucket: torch.zeros(shape, dtype=torch.float64) for bucket, shape in shapes.items()}

    def _enters(self, bucket: Bucket, flat: Tensor) -> None:
        self.given[bucket] += flat.view_as(self.given[bucket])
        self.size[bucket] += flat.view_as(self.given[bucket]).abs()

    def scatter(self, bucket: Bucket, out: Tensor, flat: Tensor, group: dist.ProcessGroup) -> None:
        if self._replicas == 1:
            self._enters(bucket, flat)
        super().scatter(bucket, out, flat, group)
        if self._replicas == 1:
            self.got[bucket][group.rank()] += out

    def sum(self, bucket: Bucket, flat: Tensor, group: dist.ProcessGroup) -> None:
        self._enters(bucket, flat)
        super().sum(bucket, flat, group)
        if group.rank() == 0:  # all ranks have the same
            self.got[bucket][0] += flat

    def worst(self) -> float:
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


@dataclass(frozen=True)
class Trained:
    """Losses of a rank, the worst of `Recorded`, and the bytes it sent and ought to have sent."""

    losses: list[float]
    worst: float
    sent: int
    planned: int


def train(config: Config, steps: int) -> Trained:
    """Trains, and compares the copies of parameters."""
    with mock.patch.object(build, "CompressedReduction", Recorded), built(config) as (mesh, state, step):
        losses = [step(state).loss for _ in range(steps)]
        check_replicas(state.named_parameters(), state.tied_names(), mesh, state.step)
        reduction = state.runner.mesh.reduction
        if reduction is None:
            return Trained(losses, 0.0, 0, 0)
        assert isinstance(reduction, Recorded)
        passes = state.loader.num_micro_batches if config.parallelism.zero >= 2 else 1
        planned = steps * reduction.step_bytes(passes)[0]
        return Trained(losses, reduction.worst(), reduction.counted.sent, planned)


def sums(state: TrainState) -> dict[str, Tensor]:
    """Each parameter's errors, added up over all lanes, whole and in float64."""
    reduction = state.runner.mesh.reduction
    assert isinstance(reduction, CompressedReduction)
    return {}


@contextmanager
def resumed(config: Config, folder: Path | None) -> Iterator[tuple[TrainState, Step, list[str]]]:
    """A run, from a checkpoint if there is one, and its notes."""
    with built(config) as (_, state, step):
        notes = [] if folder is None else state.load(folder, lambda _: None)
        if folder is not None:
            state.load_meta({**state.meta(), "step": int(folder.name.rpartition("-")[2])})
        yield state, step, notes


def saved(config: Config, folder: str, source: str | None, steps: int, more: int) -> tuple[str, list[float], list[str]]:
    """The checkpoint after `steps` steps from `source`, the losses of `more` steps after it, and notes."""
    with resumed(config, None if source is None else Path(source)) as (state, step, notes):
        mesh = state.runner.mesh
        for _ in range(steps):
            step(state)
        checkpointer = Checkpointer(CheckpointConfig(async_save=False), Path(folder), mesh)
        path = checkpointer.save(state.tensors(), state.meta(), "", None, lambda _: None)
        checkpointer.close()
        return str(path), [step(state).loss for _ in range(more)], notes
