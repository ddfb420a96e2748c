"""Runs with gradients of low rank, on every rank, and a simulation in float64."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from distributed.cells.steps import built
from gptlite.config import Config
from gptlite.satellites.compressed import build
from gptlite.satellites.compressed.buckets import Bucket
from gptlite.satellites.compressed.powersgd import LowRankReduction
from gptlite.satellites.monitor.replicas import check_replicas

Values = dict[str, NDArray]


class Watched(LowRankReduction):
    """Keeps the values and results of each sum by parameter, as matrices or vectors in float64."""

    def sum(self, bucket: Bucket, flat: Tensor, group: dist.ProcessGroup) -> None:
        if not hasattr(self, "first"):
            self.seen: list[tuple[Values, Values]] = [({}, {})]
            self.first = {self._lanes[p].name: _numpy(q) for p, q in self._factors.items()}
        if self._lanes[bucket.parameters[0]].name in self.seen[-1][0]:
            self.seen.append(({}, {}))
        self.seen[-1][0].update(self._named(bucket, flat))
        super().sum(bucket, flat, group)
        self.seen[-1][1].update(self._named(bucket, flat))

    def _named(self, bucket: Bucket, flat: Tensor) -> Values:
        held = self._errors[bucket]
        parts = bucket.row(flat)[0].split(held.sizes)
        shapes = self._shapes(held)
        names = [self._lanes[each].name for each in held.parameters]
        return {name: _numpy(part.view(shape)) for name, part, shape in zip(names, parts, shapes, strict=True)}


def _numpy(tensor: Tensor) -> NDArray:
    return tensor.detach().double().numpy().copy()


@dataclass
class Sums:
    """A rank's values and results of the sums of each step, the first Q of each matrix, its last errors, and bytes."""

    steps: list[tuple[Values, Values]]
    first: Values
    errors: Values
    sent: int
    planned: int


def watched(config: Config, steps: int) -> Sums:
    """Trains, and compares the copies of parameters after each step."""
    with mock.patch.object(build, "LowRankReduction", Watched), built(config) as (mesh, state, step):
        for _ in range(steps):
            step(state)
            check_replicas(state.named_parameters(), state.tied_names(), mesh, state.step)
        reduction = state.runner.mesh.reduction
        assert isinstance(reduction, Watched)
        errors = {reduction._lanes[p].name: _numpy(each[0]) for p, each in reduction._views()}
        return Sums(reduction.seen, reduction.first, errors, reduction.counted.sent, steps * reduction.step_bytes(1)[0])


@dataclass
class Simulation:
    """PowerSGD of all workers for one matrix, in numpy, from the paper: each worker's error is what it had beyond the
    mean of all. Only the sum of these errors matters."""

    q: NDArray
    errors: list[NDArray]

    def take(self, gradients: list[NDArray]) -> NDArray:
        """The sum that the workers get."""
        values = [gradient + error for gradient, error in zip(gradients, self.errors, strict=True)]
        p, _ = np.linalg.qr(sum(each @ self.q for each in values) / len(values))
        self.q = sum(each.T @ p for each in values) / len(values)
        self.errors = [each - p @ self.q.T for each in values]
        return len(values) * p @ self.q.T
