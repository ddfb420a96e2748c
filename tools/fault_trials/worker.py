"""Runs of pytest in a copy of the checkout, by a server process that forks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_trials.checkout import Copy
from fault_trials.fault_coverage import SERVER

# Packages that the server imports once. They must not start threads, which a fork would lose.
PRELOADED = (
    *"numpy torch torch.utils.data torch.distributed torch.distributed.fsdp torch.distributed.tensor".split(),
    *"torch.distributed.checkpoint torch.distributed.pipelining hydra omegaconf".split(),
)
LIMIT = "time limit"
# Compiles the kernels of the copy, and prints the hash of the library.
COMPILE = """
import hashlib
from gptlite.kernels.library import prepare
print("library", hashlib.sha256(prepare(False, print).path.read_bytes()).hexdigest())
"""
NO_TESTS = 5  # pytest's exit code if it collected none


@dataclass(frozen=True)
class Outcome:
    """Result of a run of pytest. `caught` is the failed test, a file that cannot be imported, or another reason.

    `status` is the exit code, or None after the time limit. `seconds` are those of each test that ended.
    """

    status: int | None
    processor_seconds: float
    caught: str | None
    why: str
    seconds: dict[str, float] = field(default_factory=dict)
    failures: tuple[str, ...] = ()


class Worker:
    """Runs tests in a copy. `close` ends its process."""

    def __init__(self, copy: Copy, preloaded: Sequence[str]):
        self.copy, self._preloaded = copy, preloaded
        self._log = (copy.folder / "server.log").open("ab")
        self._server = self._start()

    def _start(self) -> subprocess.Popen[str]:
        code = "import fault_server; fault_server.serve()"
        return subprocess.Popen(
            [str(self.copy.python), "-c", code, *self._preloaded],
            env=self.copy.environment() | {SERVER: "1"},
            cwd=self.copy.tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def close(self) -> None:
        """End the server, which ends all processes that the tests have started."""
        assert self._server.stdin is not None
        self._server.terminate()
        self._server.wait()
        self._server.stdin.close()
        self._log.close()

    def test(
        self,
        files: Sequence[str],
        tests: Sequence[str] | None,
        limit: float,
        options: Sequence[str] = ("-x",),
        measure: bool = False,
    ) -> Outcome:
        """Run tests of some files, all of them if `tests` is None, and return the outcome."""
        folder = Path(tempfile.mkdtemp(dir=self.copy.folder, prefix="run-"))
        request = {"folder": str(folder), "files": list(files), "tests": tests, "options": list(options)}
        try:
            reply = self._ask(request | {"limit": limit, "measure": measure})
            return _outcome(folder, reply, files)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def execute(self, code: str, limit: float = 900) -> tuple[int | None, str]:
        """Execute Python code in a forked process of the copy. Return the exit code and the output."""
        folder = Path(tempfile.mkdtemp(dir=self.copy.folder, prefix="run-"))
        reply = self._ask({"folder": str(folder), "code": code, "limit": limit})
        output = (folder / "output.txt").read_text(errors="replace")
        shutil.rmtree(folder, ignore_errors=True)
        return reply["status"], output

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        if line := self._server.stdout.readline():
            return json.loads(line)
        status = self._server.wait()
        if not Path(request["folder"], "output.txt").exists():  # it has not begun
            log = (self.copy.folder / "server.log").read_text(errors="replace")
            raise OSError(f"the server of the tests ends with status {status}: {log[-2000:]}")
        self._server = self._start()  # a fault may make the tests end their parents
        return {"status": status, "processor_seconds": 0.0}


def _outcome(folder: Path, reply: dict[str, Any], files: Sequence[str]) -> Outcome:
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    failures = [event for event in events if event["kind"] in ("failure", "collection")]
    seconds = {event["name"]: event["seconds"] for event in events if event["kind"] == "end"}
    started = [event["name"] for event in events if event["kind"] == "start"]
    status, spent = reply["status"], reply["processor_seconds"]
    names = tuple(dict.fromkeys(event["name"] for event in failures))
    if failures:
        return Outcome(status, spent, names[0], failures[0]["why"], seconds, names)
    if status in (0, NO_TESTS):
        return Outcome(status, spent, None, "", seconds)
    # A hang, a crash, or an error outside the tests. The last test that started is the likely place.
    place = started[-1] if started else files[0] if files else "pytest"
    output = (folder / "output.txt").read_text(errors="replace") if (folder / "output.txt").exists() else ""
    why = LIMIT if status is None else f"exit code {status}: {output.strip()[-500:]}"
    return Outcome(status, spent, place, why, seconds, (place,))


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))
