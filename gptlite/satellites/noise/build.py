"""Construction of what measures the noise of a run's gradients, and the reading of its sums in each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gptlite.config.schema import Config
from gptlite.errors import ConfigError
from gptlite.optimizer.config import SGDConfig
from gptlite.parallelism.mesh import Mesh
from gptlite.satellites.compressed.buckets import BucketReduction
from gptlite.satellites.noise.checks import check_groups, largest_group, wanted_by, without
from gptlite.satellites.noise.estimate import NoiseEstimate, mean_and_noise
from gptlite.satellites.noise.gradients import GroupSquares
from gptlite.satellites.noise.ramp import NoiseRamp, build_ramp
from gptlite.trainer.state import TrainState
from gptlite.trainer.totals import GradientNoise, StepTotals


def build_reduction(config: Config, mesh: Mesh) -> BucketReduction | None:
    """Return dense sums that can be observed, if the noise is measured among data ranks."""
    return BucketReduction(mesh) if mesh.fsdp_size > 1 else None


def build_noise(config: Config, mesh: Mesh, state: TrainState) -> Noise | None:
    """Return what measures the noise, if the configuration asks for it. Raises ConfigError if it cannot be measured."""
    if (key := wanted_by(config)) is None:
        return None
    check_groups(config, mesh.data_size)
    chosen = mesh.data_size == 1 and config.data.micro_batch_size is None and not config.data.handed_over
    if chosen and (size := largest_group(config)) is not None:
        state.loader.micro_batch_size = min(size, state.loader.micro_batch_size)
    squares = GroupSquares(state, mesh)
    if mesh.fsdp_size == 1:
        squares.watch(list(state.weights()))
    elif type(mesh.reduction) is BucketReduction:
        mesh.reduction.observers.append(squares.observe)
    else:
        raise ConfigError(f"{key} needs the gradients' sums as they are, which parallelism.compression, zeropp and "
                          f"1-bit optimizers replace; leave those out, or use {without(key)}")  # fmt: skip
    optimizer = config.optimizer
    adascale = isinstance(optimizer, SGDConfig) and optimizer.adascale
    base = optimizer.adascale_base if isinstance(optimizer, SGDConfig) else None
    # With ZeRO 0 and 1, a rank's micro-batches are added up before they are reduced.
    per_pass = mesh.data_size == 1 or config.parallelism.zero >= 2
    return Noise(squares, mesh, per_pass, adascale, base, build_ramp(config.data, state.loader))


class Noise(GradientNoise):
    """Noise of a run's gradients, and what follows it: with `adascale` the gain of the steps, with `ramp` their batch.

    `per_pass`: every micro-batch is a group; otherwise all of a rank's together are one. `base` is the number of
    samples in the batch for which the learning rate was tuned; None: those of a group in the first step.
    """

    def __init__(
        self,
        squares: GroupSquares,
        mesh: Mesh,
        per_pass: bool,
        adascale: bool,
        base: float | None,
        ramp: NoiseRamp | None,
    ) -> None:
        self.estimate, self.adascale, self.ramp = NoiseEstimate(), adascale, ramp
        self._squares, self._mesh, self._per_pass = squares, mesh, per_pass
        self._set_base, self._base = base, base

    def share(self, targets: Tensor) -> Tensor:
        """Return this rank's summands [4]: the groups' squared norms, the squares of their numbers of targets, the
        squared norm of the gradients left out, and the number of groups. Raises ConfigError if there is one group."""
        mesh = self._mesh
        counts = (targets if self._per_pass else targets.sum().reshape(1)).double()
        if mesh.data_size * len(counts) < 2:  # a program that gives its own batches decides in each step
            raise ConfigError("optimizer.adascale=true compares gradients, and this step has one micro-batch on one "
                              "data rank; give a list of batches, or a smaller data.micro_batch_size")  # fmt: skip
        first = mesh.coordinate("pp") == 0 and mesh.coordinate("tp") == 0  # one of the ranks with these samples
        # A group of fillers is none.
        sizes, number = counts.square().sum() * first, (counts > 0).sum().double() * first
        return torch.stack([self._squares.take(), sizes, self._squares.outside(), number])

    def take(self, totals: StepTotals, samples: int, loss_scale: float, step: int, stop: int) -> None:
        """Add a step to the estimate. From the average up to it follow AdaScale's gain of the step's update, and the
        size of later batches."""
        assert totals.noise is not None
        assert totals.targets is not None
        groups, sizes, outside, number = totals.noise.tolist()
        weight = sizes / totals.targets.item() ** 2
        whole = (totals.norm.item() ** 2 if totals.square is None else totals.square.item()) - outside
        if weight < 1:  # else all targets are in one group
            square, noise = mean_and_noise(groups / loss_scale**2, whole / loss_scale**2, weight)
            self.estimate.add(square, noise, samples, round(number))
        if self.adascale:
            self._base = samples / number if self._base is None else self._base
            self.gain = self.estimate.gain(samples, self._base)
            self.gained += self.gain - 1
        if self.ramp is not None:
            self.ramp.decide(self.estimate, step, stop)

    def meta(self) -> dict[str, Any]:
        """Return the averages, the base batch, the steps gained, and the changes of the batch's size."""
        grown = {"grown": [list(change) for change in self.ramp.grown]} if self.ramp else {}
        return {"gained": self.gained, **vars(self.estimate), "base": self._base, **grown}

    def load_meta(self, meta: dict[str, Any] | None) -> None:
        """Restore the result of `meta`. A base batch of the configuration has precedence."""
        meta = meta or {"gained": 0.0, **vars(NoiseEstimate()), "base": None}
        self.gain, self.gained = 1.0, meta["gained"] if self.adascale else 0.0
        self.estimate = NoiseEstimate(meta["variance"], meta["square"], meta["weight"])
        self._base = meta["base"] if self._set_base is None else self._set_base
        if self.ramp is not None:
            self.ramp.restore(meta.get("grown", ()))
