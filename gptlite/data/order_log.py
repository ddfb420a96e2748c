"""`<run.dir>/data_order.jsonl`: by which rules each step of a run read its samples.

A row holds from its `step` on: as many steps were done, and as many `samples` read, when it was written. A row is added
where training starts, or goes on, by other rules than the last one says; it makes void what earlier rows say of later
steps, for a run may go on from an older checkpoint.
"""

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gptlite.data.batches import BatchSchedule, batch_schedule
from gptlite.errors import ConfigError

FILE_NAME = "data_order.jsonl"


@dataclass(frozen=True)
class OrderRow:
    """The rules from a step on. `eras` are as `Era.to_json` gives them."""

    step: int
    samples: int
    global_batch_size: int
    eras: list[dict[str, Any]]
    batch_ramp: list[int] | None = None
    skipped: list[list[int]] = field(default_factory=list)  # ranges of samples that no step reads

    def follows(self, other: "OrderRow") -> bool:
        """Whether `other`, earlier in the run, says the same of the steps from here on."""
        if other.step > self.step or replace(other, step=self.step, samples=self.samples) != self:
            return False
        return other.first_sample(self.step + 1) == self.samples

    def schedule(self) -> BatchSchedule:
        """How samples are cut into steps."""
        return batch_schedule(self.global_batch_size, self.batch_ramp).skipping(self.skipped)

    def first_sample(self, step: int) -> int:
        """The first sample of a step, counted from 1."""
        return self.schedule().after(self.samples, step - 1 - self.step)


def note_order(folder: Path, row: OrderRow) -> None:
    """Adds a row, unless the last one says the same. Only a line cut short is ever removed."""
    rows = read_order(folder)
    row = OrderRow(**json.loads(json.dumps(asdict(row))))  # as it will be read
    if rows and row.follows(rows[-1]):
        return
    _append(folder, asdict(row))


def note_spike(folder: Path, step: int, spike_step: int, skipped: tuple[int, int]) -> None:
    """Adds why samples are skipped from a step on; the row of rules follows.

    Once: a run that is killed and goes on from before the spike finds the same again.
    """
    row = {"step": step, "spike_step": spike_step, "skipped": list(skipped)}
    path = folder / FILE_NAME
    if not path.exists() or json.dumps(row) not in path.read_text(encoding="utf-8").splitlines():
        _append(folder, row)


def _append(folder: Path, row: dict[str, Any]) -> None:
    path = folder / FILE_NAME
    if path.exists() and (kept := path.read_bytes().rfind(b"\n") + 1) < path.stat().st_size:
        os.truncate(path, kept)  # a line that a kill has cut short
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_order(folder: Path) -> list[OrderRow]:
    """The rows, oldest first; none for a run of before there were any. ConfigError naming a line that is none."""
    path = folder / FILE_NAME
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if "spike_step" not in row:  # why samples are skipped; the next row has the rules
                rows.append(OrderRow(**row))
        except (ValueError, TypeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break  # cut short by a kill: it is written again
            raise ConfigError(f"{path}, line {number} is damaged: {error}") from error
    return rows


def row_of_step(rows: list[OrderRow], step: int) -> OrderRow | None:
    """What holds for a step, counted from 1; None for one of before the first row."""
    return next((row for row in reversed(rows) if row.step < step), None)
