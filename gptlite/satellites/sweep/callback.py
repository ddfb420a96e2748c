"""Hydra callbacks for the start and end of a sweep. Every `train` command loads this module, so imports are light."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class SweepCallback(Callback):
    """Callback that checks all cells before the first one starts, and publishes the report at the end.

    An error is raised as the cause of a SystemExit, since Hydra turns an Exception into a warning. The report is also
    published if the launcher fails.
    """

    def __init__(self) -> None:
        self._sweep: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_sweep": None}  # launchers pickle the callback for processes that run one cell

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        from gptlite.satellites.sweep.begin import Sweep

        self._sweep = _raising(lambda: Sweep(config))
        atexit.register(self._sweep.conclude)  # Hydra does not call on_multirun_end if the launcher fails

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        sys.exit(_raising(self._sweep.conclude))


def _raising(action: Callable[[], Any]) -> Any:
    """Return the action's result. Raises SystemExit from any Exception."""
    try:
        return action()
    except Exception as error:
        raise SystemExit(1) from error
