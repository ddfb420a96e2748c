"""Server that runs pytest in forked processes. It has imported the packages that all tests need, but not gptlite.

It runs in the virtual environment of a copy: `python -c "import fault_server; fault_server.serve()" PACKAGE ...`.
Each line of its standard input is a request, a JSON object:

folder   where events.jsonl and output.txt are written
files    test files
tests    names of tests, in the order in which they run; null for all tests of the files
options  further options of pytest
limit    seconds until the tests are killed
measure  true to measure the lines that each test runs
code     Python code to execute instead of tests

The reply is a JSON object with the exit code (null after the limit), the seconds and the processor seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import default_plugins

SUBREAPER, DEATH_SIGNAL = 36, 1  # options of prctl
POLL = 0.01  # seconds
TREE = Path(sys.prefix).parent / "tree"


def serve() -> None:
    """Answer requests until standard input is closed."""
    signal.signal(signal.SIGTERM, _end)
    _prctl(DEATH_SIGNAL, signal.SIGTERM)
    _prctl(SUBREAPER, 1)  # processes that the tests leave behind become children of this one
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for name in (*sys.argv[1:], *_plugins()):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in requests:
        replies.write(json.dumps(_answer(json.loads(line))) + "\n")
        replies.flush()


def _plugins() -> list[str]:
    """Return the modules that pytest imports at its start."""
    installed = (each.module for each in importlib.metadata.entry_points(group="pytest11"))
    return [*(f"_pytest.{name}" for name in default_plugins), *installed]


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    began, before = time.monotonic(), _processor_seconds()
    child = os.fork()
    if not child:
        _run(request)
    status = _wait(child, request["limit"])
    _end_children()
    return {
        "status": status,
        "seconds": round(time.monotonic() - began, 2),
        "processor_seconds": round(_processor_seconds() - before, 2),
    }


def _wait(child: int, limit: float) -> int | None:
    """Return the exit code of a process, or None if it does not end in time. Reap all processes that end meanwhile."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return os.waitstatus_to_exitcode(status)
        if not pid:
            time.sleep(POLL)
    return None


def _end_children() -> None:
    """Kill and reap all processes below this one."""
    while True:
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(POLL)


def _end(*_: object) -> None:
    _end_children()
    os._exit(0)


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = path.read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(path.parent.name))
    descendants, left = [], [os.getpid()]
    while left:
        below = children.get(left.pop(), [])
        descendants += below
        left += below
    return descendants


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


# ---- the forked process


def _run(request: dict[str, Any]) -> None:
    code = 70  # of a process that fails outside the tests
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gc.unfreeze()
        os.setsid()
        _prctl(DEATH_SIGNAL, signal.SIGKILL)
        folder = Path(request["folder"])
        output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(TREE)
        if "code" in request:
            exec(request["code"], {"__name__": "code"})
            code = 0
        else:
            code = _test(request, folder)
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _test(request: dict[str, Any], folder: Path) -> int:
    context = None
    if request["measure"]:
        import fault_coverage  # pyright: ignore[reportMissingImports]

        context = fault_coverage.start(None)
    sys.path[0] = str(Path(sys.prefix, "bin"))  # as of the command `pytest`
    arguments = ["-n", "0", *request["options"], *request["files"]]
    sys.argv = ["pytest", *arguments]
    with open(folder / "events.jsonl", "a", buffering=1) as file:
        return int(pytest.main(arguments, plugins=[_Events(file, request["tests"], context)]))


class _Events:
    """Plugin of pytest that selects tests and records their results."""

    def __init__(self, file: Any, tests: list[str] | None, context: Callable[[str], object] | None):
        self._file, self._tests, self._context = file, tests, context
        self._seconds = 0.0

    def _record(self, **event: object) -> None:
        self._file.write(json.dumps(event) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._tests is None:
            return
        known = {item.nodeid: item for item in items}
        chosen = [known[name] for name in self._tests if name in known]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._record(kind="collection", name=report.nodeid, why=_why(report))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._seconds = 0.0
        self._record(kind="start", name=item.nodeid)
        if self._context:
            self._context(item.nodeid)
        try:
            return (yield)
        finally:
            if self._context:
                self._context("")
            self._record(kind="end", name=item.nodeid, seconds=round(self._seconds, 3))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if report.failed:
            self._record(kind="failure", name=report.nodeid, why=_why(report))


def _why(report: pytest.CollectReport | pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longreprtext)[-2000:]
