"""Choice of the tests that a fault is tried against, and their order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import PurePosixPath

from fault_trials.coverage_map import CoverageMap, TestFile
from fault_trials.fault import Fault

# Test folders of product folders that have another name.
MIRRORS = {
    "gptlite/satellites/checkpoint_tool": ("tests/checkpoint_tool", "tests/tools"),
    "gptlite/commands": ("tests/tools",),
    "gptlite/data": ("tests/data", "tests/corpus"),
    "gptlite/satellites/data_tool": ("tests/tools",),
    "gptlite/satellites/images": ("tests/data",),
    "gptlite/satellites/nvme": ("tests/nvme", "tests/distributed"),
    "gptlite/satellites/samples": ("tests/models", "tests/data"),
    "gptlite/parallelism": ("tests/parallelism", "tests/distributed"),
    "gptlite/launch": ("tests/launch", "tests/distributed"),
    "kernels": ("tests/kernels", "tests/ops"),
}
COMPILED = ("tests/kernels", "tests/ops", "tests/optimizer", "tests/models", "tests/trainer", "tests/test_golden.py")
BATCH = 25.0  # expected seconds of the tests that run in one process
FILE_SECONDS = 1.0  # expected seconds for the import of a test file
SLACK = 60.0  # seconds, added to three times the expected ones


@dataclass(frozen=True)
class Batch:
    """Tests that run in one process, in this order. `limit` is their time limit in seconds."""

    tests: tuple[tuple[str, str], ...]  # file and name
    limit: float

    @property
    def files(self) -> list[str]:
        """Files of the tests."""
        return list(dict.fromkeys(file for file, _ in self.tests))

    @property
    def names(self) -> list[str]:
        """Names of the tests."""
        return [name for _, name in self.tests]


def reached(fault: Fault, known: CoverageMap) -> dict[str, list[str]]:
    """Return the tests that run the fault's statement, by file."""
    if fault.lines is None:
        return {}
    found = {file: each.reaching(fault.file, *fault.lines) for file, each in known.files.items()}
    return {file: tests for file, tests in found.items() if tests}


def runs(fault: Fault, known: CoverageMap) -> bool:
    """Return True if a test runs the fault's statement, as far as the map shows it.

    A statement that runs at import counts if its file is imported. C++ is not measured, and always counts.
    """
    if fault.lines is not None:
        return bool(reached(fault, known))
    compiled = not fault.file.endswith(".py")
    return compiled or any(fault.file in lines for each in known.files.values() for lines in each.lines.values())


def batches(fault: Fault, known: CoverageMap, excluded: Collection[str]) -> Iterator[Batch]:
    """Yield the tests for a fault.

    First come the tests that run the statement: those of the mirrored folder, then one test of each other file in
    turn, cheap ones first. Then come the other tests of these files, since fixtures and ranks that tests share count
    for the first test. If no test runs the statement (it runs at import, in C++ or not at all), whole files are tried:
    those of the mirrored folder, then those that run most of the file's lines.
    """
    tests_by_file = reached(fault, known)
    if not tests_by_file:
        yield from _packed(_whole(_fallback(fault, known), known), known, excluded)
        return
    near = [file for file in tests_by_file if is_near(fault.file, file)]
    far = [file for file in tests_by_file if file not in near]
    queues = [sorted((known.files[file].tests.get(test, 0.0), test) for test in tests_by_file[file]) for file in far]
    queues = sorted(zip(queues, far, strict=True))
    first = [(file, test) for file in sorted(near, key=_cost(known)) for test in tests_by_file[file]]
    turns = zip_longest(*([(file, test) for _, test in queue] for queue, file in queues))
    first += [each for turn in turns for each in turn if each is not None]
    yield from _packed(first, known, excluded)
    tried = set(first)
    rest = _whole([*sorted(near, key=_cost(known)), *sorted(far, key=_cost(known))], known)
    yield from _packed([each for each in rest if each not in tried], known, excluded)


def is_near(file: str, test_file: str) -> bool:
    """Return True if a test file is in the folder that mirrors a file's folder."""
    folder = PurePosixPath(file).parent.as_posix()
    mirrors = [each for each in MIRRORS if f"{folder}/".startswith(f"{each}/")]
    if mirrors:
        names = MIRRORS[mirrors[0]]
    elif "/" in folder:
        names = (f"tests/{folder.replace('gptlite/satellites/', 'gptlite/').split('/')[1]}",)
    else:
        names = (f"tests/test_{PurePosixPath(file).stem}.py",)
    return any(test_file == each or test_file.startswith(f"{each}/") for each in names)


def _fallback(fault: Fault, known: CoverageMap) -> list[str]:
    compiled = not fault.file.endswith(".py")
    stem = PurePosixPath(fault.file).stem

    def order(file: str) -> tuple[object, ...]:
        test_file = known.files[file]
        if compiled:
            place = next((i for i, name in enumerate(COMPILED) if file.startswith(name)), len(COMPILED))
            return PurePosixPath(file).stem != f"test_{stem}", place, test_file.seconds
        return not is_near(fault.file, file), -test_file.share(fault.file), test_file.seconds

    def fits(file: str) -> bool:
        if compiled:
            return file.startswith(COMPILED)
        return is_near(fault.file, file) or any(fault.file in lines for lines in known.files[file].lines.values())

    return sorted(filter(fits, known.files), key=order)


def _whole(files: Iterable[str], known: CoverageMap) -> list[tuple[str, str]]:
    return [(file, test) for file in files for test in known.files[file].tests]


def _packed(tests: Iterable[tuple[str, str]], known: CoverageMap, excluded: Collection[str]) -> Iterator[Batch]:
    """Yield batches of about BATCH seconds. In a batch, the tests of a file stay together, for their fixtures."""
    batch: list[tuple[str, str]] = []
    expected = 0.0
    for file, test in tests:
        if test in excluded:
            continue
        new = FILE_SECONDS * all(file != each for each, _ in batch)
        if batch and expected + new + known.files[file].tests[test] > BATCH:
            yield _batch(batch, expected, known)
            batch, expected, new = [], 0.0, FILE_SECONDS
        batch.append((file, test))
        expected += new + known.files[file].tests[test]
    if batch:
        yield _batch(batch, expected, known)


def _batch(tests: list[tuple[str, str]], expected: float, known: CoverageMap) -> Batch:
    files = list(dict.fromkeys(file for file, _ in tests))
    # The fixtures of a file may have counted for another test, so the longest test of each file is added.
    shared = sum(max(known.files[file].tests.values()) for file in files)
    ordered = sorted(tests, key=lambda each: files.index(each[0]))
    return Batch(tuple(ordered), 3 * (expected + shared) + SLACK)


def _cost(known: CoverageMap):
    def seconds(file: str) -> tuple[float, str]:
        each: TestFile = known.files[file]
        return each.seconds, file

    return seconds
