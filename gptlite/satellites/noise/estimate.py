"""Unbiased estimates of a gradient's square and of its noise, their averages, the noise scale and AdaScale's gain.

The targets of a global batch are divided among N groups: ranks, micro-batches, or micro-batches of ranks. Group i has
T_i of the T targets, and c_i is the sum of its targets' gradients over T, so the gradient of the batch is G = sum c_i.
If the gradient of a target has the mean mu and, per target, noise of variance v,

    E|G|^2 = |mu|^2 + v / T,    E sum |c_i|^2 = W |mu|^2 + v / T,    W = sum (T_i / T)^2,

of which both unknowns follow, for groups of any sizes. With equal groups these are the estimators of AdaScale (Johnson
et al. 2020, arXiv:2007.05105, section 3.3), and with two sizes those of the gradient noise scale (McCandlish et al.
2018, arXiv:1812.06162, appendix A.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HORIZON = 1000  # groups over which an average reaches back: AdaScale's theta is 1 - N / 1000


def mean_and_noise(groups: float, whole: float, weight: float) -> tuple[float, float]:
    """Return unbiased estimates of |mu|^2 and of the noise v / T in the batch's gradient. Either may be negative.

    `groups` is sum |c_i|^2, `whole` is |G|^2, and `weight` is W, below 1.
    """
    noise = (groups - weight * whole) / (1 - weight)
    return whole - noise, noise


@dataclass
class NoiseEstimate:
    """Debiased exponential averages of both estimates over steps.

    `variance` is that of one sample's gradient, tr(Sigma): the noise in a batch's gradient times its samples, so that
    steps with batches of other sizes can be averaged. `weight` is the sum of the weights of the steps.

    Floors are applied to the averages alone: clipping each step's estimate at 0, as FairScale does, biases `square`
    upwards where noise dominates (docs/adascale.md).
    """

    variance: float = 0.0
    square: float = 0.0
    weight: float = 0.0

    def add(self, square: float, noise: float, samples: int, groups: int) -> None:
        """Add the estimates of a step, whose batch of `samples` was divided among so many groups."""
        keep = max(1 - groups / HORIZON, 0.0)
        before, self.weight = keep * self.weight, keep * self.weight + (1 - keep)
        # Averages of what has been seen, not of a sum that begins at 0: as (biased average) / (its weight).
        self.variance = (before * self.variance + (1 - keep) * noise * samples) / self.weight
        self.square = (before * self.square + (1 - keep) * square) / self.weight

    @property
    def noise_scale(self) -> float | None:
        """tr(Sigma) / |mu|^2 in samples (B_simple of arXiv:1812.06162); None if the mean is lost in the noise."""
        return max(self.variance, 0.0) / self.square if self.square > 0 else None

    def exceeds(self, samples: float) -> bool:
        """Return True if the noise scale is above `samples`, as it is where the mean is lost in the noise."""
        return self.variance > max(samples * self.square, 0.0)

    def gain(self, samples: int, base: float) -> float:
        """Return AdaScale's gain for a batch of `samples`, at a rate tuned for a batch of `base`: between 1, where the
        gradient has no noise, and samples / base, where it has nothing else."""
        variance, square = max(self.variance, 0.0), max(self.square, 0.0)
        below = variance / samples + square
        return (variance / base + square) / below if below > 0 and math.isfinite(below) else 1.0
