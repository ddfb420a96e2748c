"""Plant seeded faults one at a time, and run the tests that reach each until one fails.

python tools/faults.py run out=FILE [count=200] [seed=1] [jobs=2] [budget=240] [mark=quick|slow] [tests=REVISION]
    [faults=FILE | uncaught=FILE] [areas=NAME,...] [folders=tests] [map=FOLDER]

out       results, a JSON object per line; faults in this file are not tried again
count     number of faults, in equal shares for the areas; seed determines which
budget    processor seconds of the tests of a fault; it counts as not caught after that, and `left` gives the tests left
mark      quick runs the tests of a plain `pytest`, slow those of `pytest -m slow`
tests     use the tests of this git revision, with the faults planted in the files as they are here
faults    try the faults of an earlier results file instead
uncaught  try only those faults of an earlier results file that no test has caught
areas     only these areas
folders   use only the tests in these files or folders, separated by commas
map       folder of the measurements of the tests (see `map`); they are completed first

A fault that makes the tests hang counts as caught after three times their usual time plus a minute. A test that fails
without the fault, too, is excluded. Faults without an effect on the compiled code are replaced by others.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from fault_trials.areas import AREAS, draw, select, shares
from fault_trials.fault import Fault
from fault_trials.session import MARKS, ROOT, complete_map, map_folder, run_threads, workers
from fault_trials.trials import CAUGHT, INVALID, VERDICTS, Checked, Queue, Trials, read_records
from fault_trials.worker import LIMIT
from gptlite.errors import ConfigError
from gptlite.progress import format_duration, log


@dataclass
class Options:
    """Command-line options."""

    out: str = MISSING
    count: int = 200
    seed: int = 1
    jobs: int = 2
    budget: float = 240.0
    mark: str = "quick"
    tests: str | None = None
    faults: str | None = None
    uncaught: str | None = None
    areas: str | None = None
    folders: str = "tests"
    map: str | None = None


def run(options: Options) -> int:
    """Try the faults and append the results to `out`. Raises ConfigError."""
    folder = map_folder(ROOT, options.map, options.tests, options.mark)
    out = Path(options.out)
    with workers(ROOT, options.jobs, options.tests) as pool:
        left = Queue(*remaining(*chosen(pool[0].copy.tree, options), read_records(out)))
        if not left.total:
            log(f"{out} has the results of all faults")
            return 0
        known = complete_map(folder, pool, options.folders, options.mark)
        checked = Checked({name for each in known.files.values() for name in each.failed})
        trials = [Trials(worker, known, checked, options.budget, MARKS[options.mark]) for worker in pool]
        out.parent.mkdir(parents=True, exist_ok=True)
        report = Report(out, left.total)
        run_threads([lambda each=each: left.work(each, report.add) for each in trials])
        left.check()
    for name in sorted(checked.excluded):
        log(f"excluded, since it fails without a fault: {name}")
    return 0


def chosen(tree: Path, options: Options) -> tuple[dict[str, list[Fault]], dict[str, int]]:
    """Return the faults of each area in their order, and the number of them to try. Raises ConfigError."""
    names = options.areas.split(",") if options.areas else list(AREAS)
    if unknown := [name for name in names if name not in AREAS]:
        raise ConfigError(f"areas={options.areas}: {unknown[0]} is not one of {', '.join(AREAS)}")
    if options.faults and options.uncaught:
        raise ConfigError("faults and uncaught exclude each other; leave out one of them")
    if source := options.faults or options.uncaught:
        if not Path(source).is_file():
            raise ConfigError(f"{'faults' if options.faults else 'uncaught'}={source} does not exist")
        verdicts = [each for each in VERDICTS if options.faults or each not in (CAUGHT, LIMIT)]
        records = [each for each in read_records(Path(source)) if each["verdict"] in verdicts and each["area"] in names]
        pending, lost = select(tree, records)
        for record in lost:
            log(f"no longer in the sources: {record['file']}:{record['line']} {record['old']} -> {record['new']}")
        return pending, {area: len(faults) for area, faults in pending.items()}
    drawn = draw(tree, options.seed, options.count)
    wanted = shares(list(AREAS), options.count)
    return {name: drawn[name] for name in names}, {name: wanted[name] for name in names}


def remaining(
    pending: dict[str, list[Fault]], wanted: dict[str, int], records: list[dict[str, Any]]
) -> tuple[dict[str, list[Fault]], dict[str, int]]:
    """Return the faults of each area without those that have a record, and the number of them still to try."""
    done = {record["id"]: record for record in records}
    counted = {name for name, record in done.items() if record["verdict"] != INVALID}
    left = {area: [fault for fault in faults if fault.id not in done] for area, faults in pending.items()}
    return left, {area: wanted[area] - sum(each.id in counted for each in faults) for area, faults in pending.items()}


@dataclass
class Report:
    """Results file, and the lines that show the progress."""

    out: Path
    total: int
    started: float = field(default_factory=time.monotonic)
    verdicts: Counter[str] = field(default_factory=Counter)

    def add(self, record: dict[str, Any]) -> None:
        """Append a record to the file, and print a line for it."""
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.verdicts[record["verdict"]] += 1
        number = sum(self.verdicts[verdict] for verdict in VERDICTS)
        took = time.monotonic() - self.started
        eta = format_duration(took * (self.total - number) / max(number, 1))
        by = f" by {record['by']}" if record["by"] else ""
        place = f"{record['file']}:{record['line']}"
        print(f"{record['verdict']}{by}: {place}: {record['old']} -> {record['new']}", flush=True)
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self.verdicts.items())
        print(f"faults: {number} of {self.total}, {counts}, ETA {eta}", file=sys.stderr, flush=True)
