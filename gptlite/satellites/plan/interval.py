"""Best interval between checkpoints, from the time of a save and the mean time between failures. Does not import torch.

Young 1974, "A first order approximation to the optimum checkpoint interval", doi:10.1145/361147.361115; Daly 2006, "A
higher order estimate of the optimum checkpoint interval for restart dumps", doi:10.1016/j.future.2004.11.016.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, sqrt


@dataclass(frozen=True)
class Failures:
    """Failures of a run and their price, in seconds: `mtbf` is the mean time between two failures of any of its nodes,
    `save` the time that steps wait for a checkpoint, `restart` the time from a failure to the next step."""

    mtbf: float
    save: float
    restart: float

    def young(self) -> float:
        """Return Young's estimate of the best seconds of training between two saves."""
        return sqrt(2 * self.save * self.mtbf)

    def daly(self) -> float:
        """Return Daly's higher-order estimate of the same, which stays right if saves are slow."""
        ratio = self.save / (2 * self.mtbf)
        if ratio >= 1:
            return self.mtbf
        return self.young() * (1 + sqrt(ratio) / 3 + ratio / 9) - self.save

    def goodput(self, interval: float) -> float:
        """Return the expected share of the time that is useful, with `interval` seconds of training between two saves,
        in Daly's complete model: failures come at exponential times, also during saves and restarts."""
        exponent = (interval + self.save) / self.mtbf
        if exponent > 500:  # a run that hardly ever saves between two failures
            return 0.0
        return interval / (self.mtbf * exp(self.restart / self.mtbf) * expm1(exponent))

    def best_steps(self, step: float) -> int:
        """Return the best number of steps between two saves, at least 1, for steps of `step` seconds."""
        return max(1, round(self.daly() / step))


def mtbf_of(hours: float, nodes: int) -> float:
    """Return the mean seconds between failures of any of `nodes` nodes that each fail once in `hours` on average."""
    return hours * 3600 / nodes


def mtbf_of_memory(hours: float, nodes: int, replicas: int, exposed: float) -> float:
    """Return the mean seconds between losses of a part of the checkpoints in memory, which only a disk survives.

    A part is on a node and on the `replicas` next ones. It is lost if all of them fail within `exposed` seconds, until
    the next copies exist. `replicas + 1` such sets contain a node.
    """
    return mtbf_of(hours, nodes) / ((replicas + 1) * min(1.0, exposed / (hours * 3600)) ** replicas)
