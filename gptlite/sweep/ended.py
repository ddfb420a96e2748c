"""How a sweep leaves Hydra. No torch here: every command loads it."""

from __future__ import annotations

HERE = "BasicLauncher"  # Hydra's own, which runs jobs one after the other in the sweep's process


class Ended(BaseException):
    """The sweep is over, with that exit code or because of that error. Not an Exception, which Hydra would keep."""

    def __init__(self, code: int, error: Exception | None = None) -> None:
        super().__init__(code, error)
        self.code, self.error = code, error
