"""Log of the sample order of a run, in `<run.dir>/data_order.jsonl`: the rules that select the samples of each step.

A row is written after `step` steps and `samples` samples, and applies to all later steps. A row is added when training
starts, and when it resumes with rules that differ from the last row. If it resumes from an older checkpoint, the row
overrides earlier rows that have a larger `step`.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from gptlite.data.batches import BatchSchedule, batch_schedule
from gptlite.data.eras import Era, check_eras
from gptlite.documents import Between, Count, DocumentError, Size, checked, parse_json
from gptlite.errors import ConfigError
from gptlite.files import open_inside, open_regular

FILE_NAME = "data_order.jsonl"
Range = Annotated[list[Count], Between(2, 2)]  # the first sample, and the one after the last


class Eras:
    """Rule for a list of eras in the form of `Era.to_json`."""

    def __call__(self, value: list[dict[str, Any]], key: str) -> None:
        """Raise DocumentError for another list."""
        check_eras(checked(value, list[Era], key), key)


@dataclass(frozen=True)
class OrderRow:
    """Rules for the steps after `step`. `eras` are in the form of `Era.to_json`."""

    step: Count
    samples: Count
    global_batch_size: Size
    eras: Annotated[list[dict[str, Any]], Eras()]
    batch_ramp: list[Size] | None = None
    skipped: list[Range] = field(default_factory=list)  # ranges of samples that no step reads

    def follows(self, other: "OrderRow") -> bool:
        """Return True if the earlier row `other` already implies the rules of this row for all later steps."""
        # All fields but the position must be equal, and the position must follow from the earlier row.
        if other.step > self.step or replace(other, step=self.step, samples=self.samples) != self:
            return False
        return other.first_sample(self.step + 1) == self.samples

    @classmethod
    def of(cls, schedule: BatchSchedule, eras: Sequence[Era], step: int, samples: int) -> list["OrderRow"]:
        """Return the rows for the steps after `step` and `samples` samples. A size that the run has measured is that of
        the next step, and then of those after it, for which another may be decided already."""
        ramp, skipped = schedule.ramp, [list(each) for each in schedule.skipped]
        row = cls(step, samples, schedule.global_batch_size, [era.to_json() for era in eras], skipped=skipped)
        if not schedule.measured:
            return [replace(row, batch_ramp=list(ramp) if ramp else None)]
        places = (step, samples), (step + 1, schedule.after(samples))
        return [replace(row, step=n, samples=first, global_batch_size=schedule.size(first)) for n, first in places]

    def schedule(self) -> BatchSchedule:
        """Return the schedule that divides the samples into steps."""
        return batch_schedule(self.global_batch_size, self.batch_ramp).skipping(self.skipped)

    def first_sample(self, step: int) -> int:
        """Return the first sample of a step. Steps are counted from 1."""
        return self.schedule().after(self.samples, step - 1 - self.step)


def note_order(folder: Path, row: OrderRow) -> str:
    """Append a row unless the last one implies the same rules. Nothing is removed except a truncated last line.

    Return "", or what is damaged: the samples follow from the checkpoint, so a run goes on without its earlier rows.
    """
    damage = ""
    try:
        rows = read_order(folder)
    except ConfigError as error:
        rows, damage = [], str(error)
    row = OrderRow(**json.loads(json.dumps(asdict(row))))  # in the form in which it will be read back
    if not rows or not row.follows(rows[-1]):
        _append(folder, asdict(row))
    return damage


def note_spike(folder: Path, step: int, spike_step: int, skipped: tuple[int, int]) -> None:
    """Append the reason for skipped samples: a loss spike at `spike_step`, after which the run went back to `step`.

    The row with the new rules follows this one. If a resumed run detects the same spike again, nothing is added.
    """
    row = {"step": step, "spike_step": spike_step, "skipped": list(skipped)}
    path = folder / FILE_NAME
    if not path.exists() or json.dumps(row) not in "".join(_lines(path)).splitlines():
        _append(folder, row)


def _append(folder: Path, row: dict[str, Any]) -> None:
    path = folder / FILE_NAME
    with open_inside(folder, path, "a+", encoding="utf-8") as file:
        if (kept := path.read_bytes().rfind(b"\n") + 1) < path.stat().st_size:
            file.truncate(kept)  # remove a line truncated by a kill
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _lines(path: Path) -> list[str]:
    with open_regular(path, "r", encoding="utf-8", errors="replace") as file:
        return file.read().splitlines(keepends=True)


def read_order(folder: Path) -> list[OrderRow]:
    """Return the rows, oldest first; [] for a run without a log. Raises ConfigError naming a damaged line."""
    path = folder / FILE_NAME
    if not path.exists():
        return []
    lines = _lines(path)
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line, dict[str, Any])
            if "spike_step" not in row:  # rows of note_spike only give a reason
                rows.append(checked(row, OrderRow))
        except DocumentError as error:
            if number == len(lines) and not line.endswith("\n"):
                break  # truncated by a kill: the row is written again
            raise ConfigError(f"{path}, line {number} is damaged: {error}") from error
    return rows


def row_of_step(rows: list[OrderRow], step: int) -> OrderRow | None:
    """Return the row that applies to a step, counted from 1, or None for a step before the first row."""
    return next((row for row in reversed(rows) if row.step < step), None)
