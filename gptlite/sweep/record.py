"""What is kept of a cell of a sweep. No torch here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

OK, OUT_OF_MEMORY, PRUNED, FAILED, INTERRUPTED = "ok", "out of memory", "pruned", "failed", "interrupted"
STATUSES = (OK, OUT_OF_MEMORY, PRUNED, FAILED, INTERRUPTED)
FINISHED = (OK, OUT_OF_MEMORY, PRUNED)  # not run again when the sweep goes on


@dataclass
class Record:
    """A cell and how it ended. `status` is one of STATUSES, `reason` a line where there is one to give.

    `name` is what differs from the other cells; `layout` is in words. `wall_seconds` is over all attempts. `result` is
    the run's result.json, {} where it wrote none; `predicted` the fields of the planner's Prediction. `digest` is of
    the resolved configuration, by which a sweep that goes on knows what it has.
    """

    number: int
    name: str
    overrides: list[str]
    status: str
    reason: str = ""
    run_dir: str = ""
    exit_code: int | None = None
    world_size: int | None = None
    layout: str = ""
    wall_seconds: float | None = None
    result: dict[str, Any] = field(default_factory=dict)
    predicted: dict[str, Any] | None = None
    digest: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Record:
        """The record that `to_dict` made. Raises KeyError or TypeError for anything else; leaves out unknown keys."""
        known = {item.name for item in dataclasses.fields(cls)}
        record = cls(**{key: value for key, value in values.items() if key in known})
        if record.status not in STATUSES:
            raise KeyError(f"status {record.status}")
        return record
