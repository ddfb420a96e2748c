"""Metrics of the noise of a run's gradients."""

from __future__ import annotations

from typing import Any

from gptlite.satellites.noise.build import Noise
from gptlite.trainer.observers import Observer
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import StepResult


class NoiseReport(Observer):
    """Entries of rows and of result.json: `noise_scale` in samples, None while the gradient is lost in its noise; with
    AdaScale also `gain`, of the row's step, and `clock`, the schedule's."""

    def __init__(self, noise: Noise) -> None:
        self._noise, self._step = noise, 0

    def after(self, result: StepResult) -> None:
        """Note the number of the step."""
        self._step = result.step

    def entries(self) -> dict[str, Any]:
        """Return the values after the last step."""
        noise = self._noise
        more = {"gain": noise.gain, "clock": self._step + noise.gained} if noise.adascale else {}
        return {"noise_scale": noise.estimate.noise_scale, **more}

    def figures(self) -> dict[str, Any]:
        """Return the same."""
        return self.entries()


def noise_report(state: TrainState) -> tuple[Observer, ...]:
    """Return the observer of a run that measures the noise; none for another run."""
    return (NoiseReport(state.noise),) if isinstance(state.noise, Noise) else ()
