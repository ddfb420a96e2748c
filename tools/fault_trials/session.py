"""Copies of the checkout with running servers, and the map of the tests. Shared by the subcommands."""

from __future__ import annotations

import json
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fault_trials.areas import AREAS
from fault_trials.checkout import copies
from fault_trials.coverage_map import CoverageMap, digest_of, measure, test_files
from fault_trials.fault import read_sources
from fault_trials.worker import COMPILE, PRELOADED, Worker
from gptlite.errors import ConfigError, needed_package
from gptlite.progress import Progress, log

ROOT = Path(__file__).resolve().parents[2]
MARKS = {"quick": (), "slow": ("-m", "slow")}  # options of pytest
CACHE = Path(".pytest_cache", "faults")
SOURCES = "sources.txt"  # file of a map's folder with the hashes of the measured sources


@contextmanager
def workers(root: Path, jobs: int, tests: str | None) -> Iterator[list[Worker]]:
    """Make `jobs` copies of a checkout, with a worker for each. The copies are removed at the end."""
    if jobs < 1:
        raise ConfigError(f"jobs={jobs} must be at least 1")
    compiled = (root / CACHE / "ccache").absolute()
    log(f"copying the checkout {jobs} times" + (f", with the tests of {tests}" if tests else ""))
    if shutil.which("ccache") is None:
        log("ccache is not installed: each fault of a C++ file compiles all kernels; apt-get install ccache")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copies are removed
    folder, checkouts = copies(root, jobs, tests, compiled)
    started: list[Worker] = []
    try:
        started += [Worker(copy, PRELOADED) for copy in checkouts]
        started[0].execute(COMPILE)  # without a compiler or kernels, the tests report it
        checkouts[0].keep_kernels()
        for copy in checkouts:
            copy.clean()
        yield started
    finally:
        for each in started:
            each.close()
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


def map_folder(root: Path, path: str | None, tests: str | None, mark: str) -> Path:
    """Return the folder of the map: `path`, or one for these tests in the cache. Raises ConfigError."""
    if mark not in MARKS:
        raise ConfigError(f"mark={mark} is not one of {', '.join(MARKS)}")
    if path:
        return Path(path)
    name = "here"
    if tests:
        shown = subprocess.run(["git", "-C", str(root), "rev-parse", tests], capture_output=True, text=True)
        name = shown.stdout[:12] if shown.returncode == 0 else tests
    return root / CACHE / f"map-{name}-{mark}"


def complete_map(folder: Path, pool: list[Worker], folders: str, mark: str) -> CoverageMap:
    """Return the map of the test files below `folders`, after measuring those that it lacks."""
    tree = pool[0].copy.tree
    known = CoverageMap(folder)
    known.load(tree)
    files = test_files(tree, [name for name in folders.split(",") if name])
    if not files:
        raise ConfigError(f"folders={folders} contains no test files")
    missing = known.missing(files)
    if missing:
        with needed_package("coverage", "the map"):
            import coverage  # noqa: F401
        log(f"map: measuring {len(missing)} of {len(files)} test files into {folder}")
        _measure(missing, pool, known, MARKS[mark])
    _warn(known, tree)
    known.files = {file: each for file, each in known.files.items() if file in files}
    for name in sorted({name for each in known.files.values() for name in each.failed}):
        log(f"excluded, since it fails without a fault: {name}")
    return known


def _measure(files: list[str], pool: list[Worker], known: CoverageMap, options: tuple[str, ...]) -> None:
    progress = Progress("map", len(files), log, unit="test files")
    lock = threading.Lock()

    def done(worker: Worker, file: str) -> None:
        measured = measure(worker, file, options)
        with lock:
            known.add(measured)
            progress.add(1)

    in_parallel(files, pool, done)


def in_parallel(items: Sequence[str], pool: list[Worker], work: Callable[[Worker, str], None]) -> None:
    """Call work(worker, item) for all items, each worker in one thread. Raises the first error."""
    left: queue.SimpleQueue[str] = queue.SimpleQueue()
    for item in items:
        left.put(item)
    errors: list[BaseException] = []

    def run(worker: Worker) -> None:
        try:
            while not errors:
                work(worker, left.get_nowait())
        except queue.Empty:
            return
        except BaseException as error:
            errors.append(error)

    run_threads([lambda worker=worker: run(worker) for worker in pool])
    if errors:
        raise errors[0]


def run_threads(functions: Sequence[Callable[[], None]]) -> None:
    """Run functions in parallel. Ctrl-C is noticed, and leaves the threads behind."""
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.5)


def _warn(known: CoverageMap, tree: Path) -> None:
    """Note the sources with the map. Warn if they have changed since it was begun, as line numbers then differ."""
    path = known.folder / SOURCES
    files = read_sources(tree, [pattern for patterns in AREAS.values() for pattern in patterns])
    digests = {file: digest_of(tree / file) for file in files}
    if not path.exists():
        path.write_text(json.dumps(digests, indent=0), encoding="utf-8")
        return
    before: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    changed = [file for file, digest in digests.items() if before.get(file) != digest]
    if changed:
        shown = ", ".join(changed[:5]) + (", ..." if len(changed) > 5 else "")
        log(f"map: {len(changed)} source files have changed since {known.folder} was made: {shown}; to measure again, "
            "remove the folder")  # fmt: skip
