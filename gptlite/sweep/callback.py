"""What Hydra calls when a sweep begins and ends. It is named in conf/config.yaml, and light: every command loads it."""

from __future__ import annotations

import atexit
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class SweepCallback(Callback):
    """Checks all cells before the first starts, and reports at the end, whatever ended the sweep."""

    def __init__(self) -> None:
        self._sweep: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_sweep": None}  # in a process that runs one cell

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Raises Ended with what is wrong: Hydra would make a warning of an Exception, and go on."""
        from gptlite.sweep.begin import Sweep
        from gptlite.sweep.ended import Ended

        try:
            self._sweep = Sweep(config)
        except Exception as error:
            raise Ended(1, error) from error
        atexit.register(self._sweep.conclude)  # Hydra tells nobody of a sweep that a launcher's failure has ended

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Raises Ended with the exit code of the sweep, which Hydra has no word for."""
        from gptlite.sweep.ended import Ended

        try:
            code = self._sweep.conclude()
        except Exception as error:
            raise Ended(1, error) from error
        raise Ended(code)
