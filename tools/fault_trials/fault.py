"""A seeded fault: one small change of a source file."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

SHOWN = 90  # characters of the old and of the new text in a report


@dataclass(frozen=True)
class Fault:
    """Replacement of the bytes `start` to `end` of a file by `text`.

    `lines` are the first and the last line of the statement: a test that runs one of them may reach the fault. They
    are None in a statement that runs at import, and in C++. `old` and `new` show the change in a report. `id`
    contains no line number: it does not depend on changes elsewhere in the file.
    """

    file: str
    function: str
    line: int
    operator: str
    start: int
    end: int
    text: str
    old: str
    new: str
    lines: tuple[int, int] | None
    area: str = ""
    id: str = ""

    def apply(self, source: bytes) -> bytes:
        """Return the source with the fault."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def rank(self, seed: int) -> str:
        """Return the position in the order of a seed."""
        return hashlib.sha256(f"{seed}/{self.id}".encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        """Return the fields that identify the fault in a results file."""
        return {key: value for key, value in asdict(self).items() if key not in ("start", "end", "text", "lines")}


def one_line(text: str, most: int = SHOWN) -> str:
    """Return a text without line breaks, shortened in the middle."""
    text = re.sub(r"\s+", " ", text).strip()
    half = (most - 5) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def change(source: bytes, edit: tuple[int, int, str], shown: tuple[int, int]) -> tuple[str, str]:
    """Return the text of the span `shown` before and after an edit within it."""
    start, end, text = edit
    old = source[shown[0] : shown[1]].decode()
    new = source[shown[0] : start].decode() + text + source[end : shown[1]].decode()
    if len(one_line(old, 10**9)) > SHOWN:  # show the surroundings of the edit only
        before = source[max(shown[0], start - 30) : start].decode(errors="ignore")
        after = source[end : min(shown[1], end + 30)].decode(errors="ignore")
        old, new = before + source[start:end].decode() + after, before + text + after
    return one_line(old), one_line(new)


def identified(faults: Iterable[Fault], source: bytes) -> list[Fault]:
    """Return the faults of one file with their ids. Equal lines of a function are numbered."""
    seen: Counter[str] = Counter()
    lines = source.decode().splitlines()
    with_ids = []
    for fault in faults:
        line = lines[fault.line - 1].strip()
        key = "|".join((fault.file, fault.function, fault.operator, line, fault.old, fault.new))
        seen[key] += 1
        with_ids.append(replace(fault, id=hashlib.sha256(f"{key}|{seen[key]}".encode()).hexdigest()[:16]))
    return with_ids


def read_sources(root: Path, patterns: Iterable[str]) -> list[str]:
    """Return the paths of the files that match one of the patterns, relative to `root`."""
    return sorted({path.relative_to(root).as_posix() for each in patterns for path in root.glob(each)})
