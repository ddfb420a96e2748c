"""Rows of a certificate: the result of each stage."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StageRow:
    """Result of a stage. `passed` is None for a stage that was not checked. `words` are one line, and `details` more.

    `uncovered` has lines on what the stage does not show.
    """

    stage: str
    passed: bool | None
    words: str
    seconds: float = 0.0
    details: tuple[str, ...] = ()
    uncovered: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """`ok`, `FAILED` or `not checked`."""
        return "not checked" if self.passed is None else "ok" if self.passed else "FAILED"

    def line(self) -> str:
        """Return the row as printed."""
        return f"  {self.stage:<8} {self.words:<88} {self.verdict:>11} {self.seconds:4.0f} s"
