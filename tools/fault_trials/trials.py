"""Trials of faults: each is planted in a copy, and the tests that reach it run until one fails."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_trials.choose import SLACK, batches, runs
from fault_trials.coverage_map import CoverageMap
from fault_trials.fault import Fault
from fault_trials.worker import COMPILE, LIMIT, Worker

CAUGHT, NOT_CAUGHT, NOT_REACHED, INVALID = "caught", "not caught", "not reached", "no effect"
VERDICTS = (CAUGHT, LIMIT, NOT_CAUGHT, NOT_REACHED)  # of faults that count
FLAKY = 5  # tests of a fault that fail without it, before its trial ends


@dataclass
class Checked:
    """Tests known to pass, or to fail, without a fault. Shared by the workers."""

    excluded: set[str]
    passing: set[str] = field(default_factory=set)
    libraries: dict[int, str] = field(default_factory=dict)  # of the unchanged sources, by worker
    lock: threading.Lock = field(default_factory=threading.Lock)


class Trials:
    """Tries faults in a worker's copy, each against tests that take about `budget` processor seconds."""

    def __init__(
        self, worker: Worker, known: CoverageMap, checked: Checked, budget: float, options: tuple[str, ...] = ()
    ):
        self._worker, self._known, self._checked = worker, known, checked
        self._budget, self._options = budget, ("-x", *options)

    def run(self, fault: Fault) -> dict[str, Any]:
        """Return the record of a fault's trial."""
        began = time.monotonic()
        spent = 0.0
        verdict = NOT_CAUGHT if runs(fault, self._known) else NOT_REACHED
        result: dict[str, Any] = {"verdict": verdict, "by": None, "why": "", "tests": 0, "left": 0}
        with self._planted(fault):
            if not fault.file.endswith(".py") and (invalid := self._compiled()):
                result |= {"verdict": INVALID, "why": invalid}
            else:
                spent = self._try(fault, result)
        seconds = round(time.monotonic() - began, 1)
        return fault.record() | result | {"seconds": seconds, "processor_seconds": round(spent, 1)}

    def _try(self, fault: Fault, result: dict[str, Any]) -> float:
        spent, flaky = 0.0, 0
        pending = list(batches(fault, self._known, self._checked.excluded))
        while pending:
            batch = pending.pop(0)
            if spent >= self._budget:
                result["left"] += len(batch.tests)
                continue
            outcome = self._worker.test(batch.files, batch.names, batch.limit, self._options)
            spent += outcome.processor_seconds
            result["tests"] += len(outcome.seconds)
            if outcome.caught is None:
                continue
            if self._passes_without(outcome.caught, batch.limit, fault):
                verdict = LIMIT if outcome.why == LIMIT else CAUGHT
                result |= {"verdict": verdict, "by": outcome.caught, "why": outcome.why[-300:]}
                result["left"] = 0
                break
            flaky += 1
            if flaky < FLAKY:
                pending = list(batches(fault, self._known, self._checked.excluded))
        return spent

    def _passes_without(self, name: str, limit: float, fault: Fault) -> bool:
        """Return True if a test, or the import of a file, succeeds without the fault. Exclude it otherwise."""
        if name in self._checked.passing:
            return True
        source = (self._worker.copy.tree / fault.file).read_bytes()
        self._worker.copy.restore()
        file = name.partition("::")[0]
        tests = [name] if "::" in name else [*self._known.files[file].tests][:1] if file in self._known.files else []
        outcome = self._worker.test([file], tests, limit + SLACK, self._options)
        with self._checked.lock:
            (self._checked.passing if outcome.caught is None else self._checked.excluded).add(name)
        if outcome.caught is not None:
            self._worker.copy.plant(fault.file, source)
        return outcome.caught is None

    @contextmanager
    def _planted(self, fault: Fault) -> Iterator[None]:
        copy = self._worker.copy
        if not fault.file.endswith(".py") and id(self) not in self._checked.libraries:
            self._checked.libraries[id(self)] = self._library()[0]
        copy.plant(fault.file, fault.apply((copy.tree / fault.file).read_bytes()))
        try:
            yield
        finally:
            copy.restore()

    def _library(self) -> tuple[str, str]:
        status, output = self._worker.execute(COMPILE)
        match = re.search(r"^library (\w+)$", output, re.MULTILINE)
        return (match[1] if match and status == 0 else ""), output

    def _compiled(self) -> str:
        """Compile the kernels. Return the reason if the fault does not compile, or leaves the library the same."""
        library, output = self._library()
        if not library:
            return f"does not compile: {output.strip()[-300:]}"
        return "the compiled library is the same" if library == self._checked.libraries[id(self)] else ""


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a results file. An incomplete last line, of a run that was killed, is left out."""
    records = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                continue
    return records


class Queue:
    """Faults that the workers still have to try: those of each area in order, until `wanted` of them had an effect."""

    def __init__(self, pending: dict[str, list[Fault]], wanted: dict[str, int]):
        self._pending = pending
        self._left = {area: min(number, len(pending[area])) for area, number in wanted.items()}
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []

    @property
    def total(self) -> int:
        """Number of faults to try."""
        return sum(number for number in self._left.values() if number > 0)

    def work(self, trials: Trials, done: Callable[[dict[str, Any]], None]) -> None:
        """Try faults until none is left. `done` gets each record, one at a time."""
        try:
            while (fault := self._take()) is not None:
                record = trials.run(fault)
                with self._lock:
                    self._left[fault.area] += record["verdict"] == INVALID
                    done(record)
        except BaseException as error:
            self._errors.append(error)

    def check(self) -> None:
        """Raise the first error of a worker."""
        if self._errors:
            raise self._errors[0]

    def _take(self) -> Fault | None:
        with self._lock:
            for area in sorted(self._left, key=lambda area: -self._left[area]):
                if self._left[area] > 0 and self._pending[area] and not self._errors:
                    self._left[area] -= 1
                    return self._pending[area].pop(0)
        return None
