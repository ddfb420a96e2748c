"""Map of the tests: the lines of the product that each test runs, in its process or in processes that it starts."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_trials.fault_coverage import UNKNOWN
from fault_trials.worker import NO_TESTS, Outcome, Worker
from gptlite.progress import log

LIMIT = 1800  # seconds for the measurement of a file
ATTEMPTS = 3  # to measure a file, if pytest crashes
ENDED = (0, 1, NO_TESTS)  # exit codes of pytest if all tests have run


@dataclass(frozen=True)
class TestFile:
    """Measurement of a test file.

    `tests` gives the seconds of each test and `lines` the lines that each test runs, as {file: lines}; lines of a
    process count for the test that started it. The test "" stands for imports, and UNKNOWN for processes of which the
    test is not known. `seconds` is processor time.
    `failed` are the tests that fail without a fault.
    """

    __test__ = False  # not a class of tests

    file: str
    digest: str
    seconds: float
    tests: dict[str, float]
    lines: dict[str, dict[str, set[int]]]
    failed: tuple[str, ...]

    def reaching(self, file: str, first: int, last: int) -> list[str]:
        """Return the tests that run a line of a file between `first` and `last`."""
        wanted = set(range(first, last + 1))
        found = [test for test, lines in self.lines.items() if test and not wanted.isdisjoint(lines.get(file, ()))]
        return list(self.tests) if UNKNOWN in found else found

    def share(self, file: str) -> int:
        """Return the number of lines of a file that the tests run."""
        return len(set().union(*(lines.get(file, set()) for test, lines in self.lines.items() if test)))

    def to_json(self) -> dict[str, Any]:
        """Return the content of the measurement's file."""
        lines = {
            test: {file: _ranges(numbers) for file, numbers in files.items()} for test, files in self.lines.items()
        }
        return {**self.__dict__, "lines": lines}

    @staticmethod
    def from_json(content: dict[str, Any]) -> TestFile:
        """Return the measurement that a file contains."""
        lines = {
            test: {file: _numbers(text) for file, text in files.items()} for test, files in content["lines"].items()
        }
        return TestFile(**content | {"lines": lines, "failed": tuple(content["failed"])})


class CoverageMap:
    """Measurements of all test files, stored in a folder with a JSON file for each."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[str, TestFile] = {}

    def load(self, tree: Path) -> None:
        """Read the measurements whose test files are unchanged."""
        for path in sorted(self.folder.glob("*.json")):
            found = TestFile.from_json(json.loads(path.read_text(encoding="utf-8")))
            if (tree / found.file).is_file() and found.digest == digest_of(tree / found.file):
                self.files[found.file] = found

    def missing(self, files: Iterable[str]) -> list[str]:
        """Return the test files without a measurement."""
        return [file for file in files if file not in self.files]

    def add(self, measurement: TestFile) -> None:
        """Store a measurement."""
        self.files[measurement.file] = measurement
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{measurement.file.replace('/', '~')}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(measurement.to_json()), encoding="utf-8")
        temporary.replace(path)


def measure(worker: Worker, file: str, options: tuple[str, ...]) -> TestFile:
    """Run a test file under coverage and return the measurement. Failed tests run once more without coverage."""
    copy = worker.copy
    digest = digest_of(copy.tree / file)
    for _ in range(ATTEMPTS):
        outcome, lines = _attempt(worker, file, options)
        if outcome.status in ENDED:
            failed = outcome.failures
            if failed:
                failed = worker.test([file], failed, LIMIT, options).failures
                copy.restore()
            break
    else:
        log(f"map: {file} ends with status {outcome.status} under coverage, so the lines of its tests are incomplete")
        outcome = worker.test([file], None, LIMIT, options)
        failed = outcome.failures
        copy.restore()
    return TestFile(file, digest, outcome.processor_seconds, outcome.seconds, lines, failed)


def _attempt(worker: Worker, file: str, options: tuple[str, ...]) -> tuple[Outcome, dict[str, dict[str, set[int]]]]:
    """Run a file under coverage. Return the outcome and the lines."""
    folder = worker.copy.venv / "coverage"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    outcome = worker.test([file], None, LIMIT, options, measure=True)
    lines = _read(folder, worker.copy.tree)
    shutil.rmtree(folder)
    worker.copy.restore()
    for test in [test for test in lines if test and test != UNKNOWN and test not in outcome.seconds]:
        for name, numbers in lines.pop(test).items():  # of a test that did not end
            lines.setdefault(UNKNOWN, {}).setdefault(name, set()).update(numbers)
    return outcome, lines


def test_files(tree: Path, folders: Iterable[str]) -> list[str]:
    """Return the test files below some paths of a tree."""
    paths = []
    for name in folders:
        path = tree / name
        paths += [path] if path.is_file() else sorted(path.rglob("test_*.py"))
    return [path.relative_to(tree).as_posix() for path in paths]


def digest_of(path: Path) -> str:
    """Return the hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _read(folder: Path, tree: Path) -> dict[str, dict[str, set[int]]]:
    from coverage import CoverageData
    from coverage.exceptions import CoverageException

    lines: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for path in folder.glob("data.*"):
        data = CoverageData(str(path))
        try:
            data.read()
            for name in data.measured_files():
                file = Path(name).relative_to(tree).as_posix()
                for number, contexts in data.contexts_by_lineno(name).items():
                    for context in contexts:
                        lines[context][file].add(number)
        except CoverageException:  # of a process that was killed while it wrote
            continue
        finally:
            data.close()
    return {test: dict(files) for test, files in lines.items()}


def _ranges(numbers: set[int]) -> str:
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)


def _numbers(text: str) -> set[int]:
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
