"""Metrics of the noise of a run's gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gptlite.trainer.folder import RunFolder
from gptlite.trainer.observers import Observer
from gptlite.trainer.state import TrainState
from gptlite.trainer.step import StepResult

if TYPE_CHECKING:
    from gptlite.satellites.noise.build import Noise


class NoiseReport(Observer):
    """Entries of rows and of result.json: `noise_scale` in samples, None while the gradient is lost in its noise; with
    AdaScale also `gain`, of the row's step, and `clock`, the schedule's; if the batch follows the noise, `batch_size`
    of the row's step, in samples. Changes of this size are logged, also in the log of the sample order."""

    def __init__(self, noise: Noise, state: TrainState, folder: RunFolder) -> None:
        self._noise, self._state, self._folder = noise, state, folder
        self._step = self._samples = 0

    def after(self, result: StepResult) -> None:
        """Note the number and the batch of the step, and the change of size that it has led to."""
        self._step, self._samples = result.step, result.samples
        schedule, scale = self._state.loader.schedule, self._noise.estimate.noise_scale
        if schedule.grown and schedule.grown[-1][0] == schedule.after(result.stop):
            self._folder.write_order(self._state)
            size = schedule.grown[-1][1]
            why = "the mean gradient is lost in its noise" if scale is None else f"noise scale {scale:.1f}"
            self._folder.log(f"step {result.step}: {why}; batches have {size} samples from step {result.step + 2} on")

    def entries(self) -> dict[str, Any]:
        """Return the values after the last step."""
        noise = self._noise
        more = {"gain": noise.gain, "clock": self._step + noise.gained} if noise.adascale else {}
        size = {"batch_size": self._samples} if noise.ramp else {}
        return {"noise_scale": noise.estimate.noise_scale, **more, **size}

    def figures(self) -> dict[str, Any]:
        """Return the same."""
        return self.entries()


def noise_words(state: TrainState) -> str:
    """Return the line that follows the banner of a run that measures the noise; an empty string for another run."""
    if state.noise is None:
        return ""
    from gptlite.satellites.noise.build import Noise  # only in a run that has imported it already

    if not isinstance(state.noise, Noise):
        return ""
    words = "noise: the gradient noise scale is measured in every step"
    if state.noise.adascale:
        words += "; AdaScale multiplies the learning rate by the gain, by which the schedule's clock advances"
    return words


def noise_report(state: TrainState, folder: RunFolder) -> tuple[Observer, ...]:
    """Return the observer of a run that measures the noise; none for another run."""
    if state.noise is None:
        return ()
    from gptlite.satellites.noise.build import Noise  # only in a run that has imported it already

    return (NoiseReport(state.noise, state, folder),) if isinstance(state.noise, Noise) else ()
