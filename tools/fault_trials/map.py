"""Measure which lines each test runs, with coverage.py.

python tools/faults.py map [jobs=2] [mark=quick|slow] [tests=REVISION] [folders=tests] [map=FOLDER]

Each test file runs once, in a copy of the checkout. Only files that have changed since their last measurement run
again. Lines that run in processes which a test starts count for this test. `run` measures what is missing by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from fault_trials.session import ROOT, complete_map, map_folder, workers
from gptlite.progress import log


@dataclass
class Options:
    """Command-line options."""

    jobs: int = 2
    mark: str = "quick"
    tests: str | None = None
    folders: str = "tests"
    map: str | None = None


def run(options: Options) -> int:
    """Complete the map. Raises ConfigError."""
    folder = map_folder(ROOT, options.map, options.tests, options.mark)
    with workers(ROOT, options.jobs, options.tests) as found:
        known = complete_map(folder, found, options.folders, options.mark)
    tests = sum(len(each.tests) for each in known.files.values())
    seconds = sum(each.seconds for each in known.files.values())
    log(f"map: {tests} tests in {len(known.files)} files, {seconds:.0f} processor seconds with coverage, in {folder}")
    return 0
