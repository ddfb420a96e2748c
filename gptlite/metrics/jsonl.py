"""Metrics file metrics.jsonl: one JSON object per line, without rows of repeated steps, readable during the run."""

import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Required, TypedDict

from gptlite.documents import Count, DocumentError, parse_json
from gptlite.files import open_inside, open_regular, write_whole


class _Row(TypedDict, total=False):
    """Values of a row that readers rely on; others are numbers or null, and readers skip what is not."""

    step: Required[Count]
    spike_step: Count
    expert_loads: list[list[float]]


class JsonlSink:
    """Sink that appends rows to a file and flushes each to the operating system, so that a killed run keeps every row.

    Each row has a `time` stamp (UTC, ISO 8601). NaN and infinity, which JSON lacks, are written as null.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, open_inside(path.parent, path, "a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row and flush it to the operating system."""
        stamped: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            **{
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in row.items()
            },
        }
        self._file.write(json.dumps(stamped, allow_nan=False) + "\n")  # NaN would not be valid JSON for other readers
        self._file.flush()

    def rewind(self, step: int) -> None:
        """Move rows later than `step` to another file, see `truncate_after`."""
        self.close()
        truncate_after(self._path, step)
        self._file = open_inside(self._path.parent, self._path, "a", encoding="utf-8")

    def close(self, failed: bool = False) -> None:
        """Sync the file to disk and close it."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl in file order, without a line truncated by a kill."""
    return [row for line in _lines(path) if (row := _parse(line)) is not None]


def truncate_after(path: Path, step: int) -> int:
    """Remove rows later than `step` from a metrics.jsonl, for a run that resumes at that step. Returns their number.

    Such rows describe training that will be repeated. They are kept in `metrics.replaced.jsonl` beside it, as is a last
    line truncated by a kill.
    """
    if not path.exists() or path.stat().st_size == 0:
        return 0
    kept, replaced = [], []
    for line in _lines(path):
        row = _parse(line)
        (kept if row is not None and row["step"] <= step else replaced).append(line)
    if not replaced and _content(path).endswith(b"\n"):
        return 0
    # Sync the copy before replacing the original, so that every row is in one of the files at any time.
    if replaced:
        with open_inside(path.parent, path.with_suffix(".replaced.jsonl"), "a", encoding="utf-8") as copy:
            copy.writelines(replaced)
            copy.flush()
            os.fsync(copy.fileno())
    write_whole(path, "".join(kept))
    return len(replaced)


def _content(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def _lines(path: Path) -> list[str]:
    # Only "\n" ends a row: str.splitlines would also cut at separators inside a string.
    text = _content(path).decode("utf-8", errors="replace")  # a kill may have cut a character
    return [line + "\n" for line in text.split("\n") if line.strip()]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        return parse_json(line, _Row)
    except DocumentError:
        return None
