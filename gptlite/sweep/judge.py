"""What a sweep's cells are judged by: validation loss where an axis changes the numbers, speed where none can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptlite.checkpoint.compare import Effect, effect_of

if TYPE_CHECKING:
    from gptlite.sweep.report_rows import Row

# A run that goes on may change these and stays the same run; cells that differ in them end elsewhere.
ENDS_ELSEWHERE = ("model", "trainer.max_steps", "trainer.max_time", "checkpoint.resume", "checkpoint.load")
# These change a resumed run's rounding alone.
ROUNDS = ("ops", "trainer.compile")
# With these, cells read other tokens: bits per byte of text compare, nats per token do not.
TOKENS = ("data", "data.tokenizer", "data.vocab_size", "data.path", "data.corpus", "data.blend")


@dataclass(frozen=True)
class Judge:
    """`axes`: the keys that differ between cells and change their numbers; none: the cells train the same model, up to
    rounding. `measure`: the field of a Row that counts, `title` in words; speed is better where it is higher, losses
    where they are lower."""

    axes: tuple[str, ...]
    measure: str
    title: str

    @property
    def by_speed(self) -> bool:
        """Whether the fastest is the best."""
        return self.measure == "speed"

    def value(self, row: Row) -> float | None:
        """What a cell is judged by; None for one that did not run to its end."""
        return getattr(row, self.measure) if row.ok else None

    def best(self, rows: Sequence[Row]) -> Row | None:
        """The best of the cells; of those with the same numbers as it, the fastest."""
        judged = [(value, row) for row in rows if (value := self.value(row)) is not None]
        if not judged:
            return None
        if self.by_speed:
            return max(judged, key=lambda pair: pair[0])[1]
        first = min(judged, key=lambda pair: pair[0])[1]
        alike = [row for _, row in judged if _values(row, self.axes) == _values(first, self.axes)]
        return max(alike, key=lambda row: row.speed or 0)

    @property
    def words(self) -> str:
        """`validation loss, since optimizer.lr changes the numbers`."""
        if not self.axes:
            return "speed, since no axis changes the numbers"
        return f"{self.title}, since {' and '.join(self.axes)} change{'s' * (len(self.axes) == 1)} the numbers"


def judge(rows: Sequence[Row]) -> Judge:
    """By what the cells differ in."""
    axes = tuple(key for key in _differing(rows) if changes_numbers(key))
    if not axes:
        return Judge((), "speed", "speed")
    measures = [("val_loss", "validation loss"), ("loss", "training loss, for want of a validation loss")]
    if any(key in TOKENS for key in axes):
        measures.insert(0, ("val_bits", "validation bits per byte"))
    for measure, title in measures:
        if any(getattr(row, measure) is not None for row in rows if row.ok):
            return Judge(axes, measure, title)
    return Judge(axes, "val_loss", "validation loss")


def changes_numbers(key: str) -> bool:
    """Whether cells that differ in this key train different models."""
    if _in(key, ENDS_ELSEWHERE):
        return key != "model.name"
    return not _in(key, ROUNDS) and effect_of(key) in (Effect.refused, Effect.changes_numbers)


def _in(key: str, keys: Sequence[str]) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in keys)


def _differing(rows: Sequence[Row]) -> list[str]:
    """The keys of the overrides that are not the same in all cells."""
    keys = dict.fromkeys(key for row in rows for key in _given(row))
    return [key for key in keys if len({_given(row).get(key) for row in rows}) > 1]


def _values(row: Row, keys: Sequence[str]) -> list[str | None]:
    return [_given(row).get(key) for key in keys]


def _given(row: Row) -> dict[str, str]:
    parts = (each.lstrip("+~").partition("=") for each in row.overrides)
    return {key: value for key, _, value in parts}
