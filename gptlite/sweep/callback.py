"""The hooks that Hydra calls as a sweep begins and ends. Light, since every command loads them (conf/config.yaml)."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class SweepCallback(Callback):
    """Checks all cells before the first starts, and reports at the end, whatever ended the sweep.

    It leaves Hydra by SystemExit, for an error with that as its cause: of an Exception Hydra would make a warning.
    """

    def __init__(self) -> None:
        self._sweep: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_sweep": None}  # in a process that runs one cell

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        from gptlite.sweep.begin import Sweep

        self._sweep = _raising(lambda: Sweep(config))
        atexit.register(self._sweep.conclude)  # Hydra tells nobody of a sweep that a launcher's failure has ended

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        sys.exit(_raising(self._sweep.conclude))


def _raising(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        raise SystemExit(1) from error
