"""Coverage of the processes of a copy's virtual environment, which imports this module at the start of each process.

A process is measured if the environment has a folder `coverage`. It saves its lines regularly, since tests kill ranks.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

FOLDER = os.path.join(sys.prefix, "coverage")  # the data files; created by the tool for the time of a measurement
TREE = os.path.join(os.path.dirname(sys.prefix), "tree")
SOURCES = ("gptlite", "kernels", "data")
UNKNOWN = "?"  # context of a process that does not know which test started it
SERVER = "GPTLITE_FAULT_SERVER"  # environment variable of the server, which starts the measurement in its children
INTERVAL = 0.3  # seconds between two saves

_called: list[bool] = []
_measuring: list[Any] = []
_saving = threading.Lock()


def start_in_child() -> None:
    """Measure this process if a measurement is in progress. Its lines count for the test that started it.

    Python reads the .pth file of a virtual environment twice, so only the first call has an effect.
    """
    if not _called:
        _called.append(True)
        if os.environ.pop(SERVER, None) is None and os.path.isdir(FOLDER):
            start(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0] or UNKNOWN)


def start(context: str | None) -> Callable[[str], object]:
    """Measure this process. Returns a function that sets the context of the lines from then on.

    With None, lines are saved at the end only, as the contexts must not change while another thread saves.
    """
    import coverage

    sources = [os.path.join(TREE, name, "*") for name in SOURCES]  # `source` would search for unused files at each save
    name = os.path.join(FOLDER, "data")
    # The tests of this tool use a tree with fewer folders, and some compare all that a process prints.
    measured = coverage.Coverage(name, data_suffix=True, include=sources, config_file=False, context=context)
    quiet = "no-data-collected module-not-imported module-not-measured module-not-python couldnt-parse no-contexts"
    measured.set_option(
        "run:disable_warnings", [*quiet.split(), "already-imported", "trace-changed", "include-ignored"]
    )
    measured.set_option("run:core", "ctrace")
    measured.start()
    _measuring[:] = [measured]
    atexit.register(save)
    os.register_at_fork(before=_saving.acquire, after_in_parent=_saving.release, after_in_child=_forked)
    leave = os._exit

    def save_and_leave(status: int) -> None:
        save()
        leave(status)

    os._exit = save_and_leave  # pyright: ignore[reportAttributeAccessIssue]
    if context is not None:
        _save_regularly()
    return measured.switch_context


def save() -> None:
    """Write the lines of this process to its file."""
    with _saving:
        for measured in _measuring:
            try:
                measured.save()
            except Exception as error:  # the test goes on, and the map lacks these lines
                print(f"coverage: {error}", file=sys.__stderr__)


def _save_regularly() -> None:
    def run() -> None:
        while True:
            wait.wait(INTERVAL)
            save()

    wait = threading.Event()
    threading.Thread(target=run, name="coverage", daemon=True).start()


def _forked() -> None:
    _saving.release()
    if _measuring:
        _save_regularly()
