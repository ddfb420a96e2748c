"""Judgement on a run with losses: against the uninterrupted one, each row that it wrote, and what it left."""

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

Row = dict[str, Any]
BANNER = "== gptlite ="  # line of train.log with which a start begins


@dataclass(frozen=True)
class Curve:
    """Steps of an uninterrupted run: the loss and the tokens after each step, counted from 1."""

    losses: dict[int, float]
    tokens: dict[int, int]

    @classmethod
    def read(cls, folder: Path) -> "Curve":
        rows, _ = step_rows((folder / "metrics.jsonl").read_text())
        return cls({row["step"]: row["loss"] for row in rows}, {row["step"]: row["tokens"] for row in rows})


def step_rows(text: str) -> tuple[list[Row], int]:
    """Return the rows of training steps, in the order written, and the number of lines that a kill has cut short."""
    rows, torn = [], 0
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            torn += bool(line.strip())
            continue
        if "loss" in row:
            rows.append(row)
    return rows, torn


def wrong(rows: list[Row], curve: Curve, tolerance: float, before: int = 0) -> list[str]:
    """Return what is wrong with rows of steps: samples lost or doubled, or another loss; [] if they are right.

    Rows that repeat steps after a restore are held against the same curve. `before` is the highest step before.
    A start may go on from any step that was trained, as nodes that come back can hold newer checkpoints.
    """
    found, last, most, start = [], before, before, None
    for row in rows:
        step, last = row["step"], last if row.get("start") == start else most
        if step > last + 1:
            found.append(f"step {step} follows step {last}: samples lost")
        last, most, start = step, max(most, step), row.get("start")
        if step not in curve.losses:
            found.append(f"step {step} is past the end")
            continue
        if row["tokens"] != (right := curve.tokens[step]):
            found.append(f"step {step}: {row['tokens']} tokens instead of {right}")
        loss, expected = row["loss"], curve.losses[step]
        if not abs(loss - expected) <= tolerance * abs(expected):  # nan is wrong, too
            found.append(f"step {step}: loss {loss!r} instead of {expected!r}, {abs(loss / expected - 1):.1e} apart")
    return found


def doubled(rows: list[Row]) -> list[str]:
    """Return steps that were repeated by the same start of the run; rows have the number of their start."""
    pairs = [(last, row) for last, row in pairwise(rows) if row["start"] == last["start"]]
    again = [(last["step"], row["step"]) for last, row in pairs if row["step"] <= last["step"]]
    return [f"step {step} follows step {last} without a restart: samples doubled" for last, step in again]


def missing(rows: list[Row], steps: int) -> list[str]:
    """Return the steps that no row has."""
    absent = sorted(set(range(1, steps + 1)) - {row["step"] for row in rows})
    return [f"no row of steps {absent[:5]}"] if absent else []


def order(folder: Path, whole: Path) -> list[str]:
    """Return a difference between the rules by which two runs have selected samples."""
    name = "data_order.jsonl"
    same = (folder / name).read_text() == (whole / name).read_text()
    return [] if same else [f"{folder / name} differs from {whole / name}"]


def source(log: str, start: int) -> str:
    """Return where the run's start of a number, from 1, took its state from, by train.log: memory, disk or new."""
    lines = log.splitlines()
    banner = [number for number, line in enumerate(lines) if line.startswith(BANNER)][start - 1]
    trained = [number for number, line in enumerate(lines) if line.startswith("step ")]
    first = max((number for number in trained if number < banner), default=0)
    last = min((number for number in trained if number > banner), default=len(lines))
    text = "\n".join(lines[first:last])
    if re.search(r"from memory of", text):
        return "memory"
    return "disk" if re.search(r"resuming from|restored from disk", text) else "new"
