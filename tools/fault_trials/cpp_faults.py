"""Possible faults of a C++ file, found line by line with patterns."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fault_trials.fault import Fault, change, identified

# A pattern, and its replacement. An operator has a space on both sides, a bracket of a template or a pointer has not.
OPERATORS = {
    "comparison": {" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == "},
    "arithmetic": {" + ": " - ", " - ": " + ", " * ": " + ", " / ": " * ", " += ": " -= ", " -= ": " += "},
    "and/or": {" && ": " || ", " || ": " && "},
    "bits": {" << ": " >> ", " >> ": " << ", " & ": " | "},
    "name": {"min(": "max(", "max(": "min(", "true": "false", "false": "true"},
}
CONSTANT = re.compile(r"(?<![\w.<])([0-9]|1[0-6])(?![\w.>'])")
STATEMENT = re.compile(
    r"^\s*((\w[\w.\[\]>-]*|\*\w+) ([-+*|^]?=) [^;]*|(store|memcpy|memset|sum_parts|check_\w+)\(.*\));$"
)
NOT_CODE = re.compile(
    r"^\s*(#|//|template|using|namespace|typedef|static_assert|struct|extern|friend|public|private|\})"
)
TEXT = re.compile(r'"(?:\\.|[^"\\])*"|//.*$|<\w[\w:, ]*>')
# A definition starts at the first column; lines such as `namespace {` and `}` do not.
FUNCTION = re.compile(r"^(?!namespace|using|template|typedef|#|//|\})\S.*?([\w~]+)\(")
RARE = re.compile(r"\b(alignas|sizeof|assert|TORCH_CHECK|STD_TORCH_CHECK|prefetch|reserve|__builtin_expect)\b")


def cpp_faults(file: str, source: bytes) -> list[Fault]:
    """Return all possible faults of a file. `file` is its path in reports."""
    return identified(_found(file, source), source)


def _found(file: str, source: bytes) -> Iterator[Fault]:
    offset, function, comment, directive = 0, "", False, False
    for number, raw in enumerate(source.splitlines(keepends=True), 1):
        start, offset = offset, offset + len(raw)
        line = raw.decode()
        continued, directive = directive, (directive or line.lstrip().startswith("#")) and line.rstrip().endswith("\\")
        comment = (comment or "/*" in line) and "*/" not in line
        if match := FUNCTION.search(line):
            function = match[1]
        if continued or comment or NOT_CODE.search(line) or RARE.search(line) or not line.isascii():
            continue
        code = TEXT.sub(lambda match: "\0" * len(match[0]), line.rstrip())
        shown = start + len(line) - len(line.lstrip()), start + len(line.rstrip())
        for operator, (begin, end, text) in _edits(code):
            edit = (start + begin, start + end, text)
            yield Fault(file, function, number, operator, *edit, *change(source, edit, shown), None)


def _edits(code: str) -> Iterator[tuple[str, tuple[int, int, str]]]:
    for operator, pairs in OPERATORS.items():
        for old, new in pairs.items():
            left = r"\b" if old[0].isalpha() else ""
            for match in re.finditer(left + re.escape(old) + (r"\b" if old[-1].isalpha() else ""), code):
                yield operator, (*match.span(), new)
    for match in CONSTANT.finditer(code):
        yield "constant + 1", (*match.span(), str(int(match[0]) + 1))
    if match := STATEMENT.search(code):
        yield "drop statement", (len(code) - len(code.lstrip()), len(code), ";")
