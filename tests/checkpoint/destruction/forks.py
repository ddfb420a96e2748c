"""Runs that start in a tenth of a second: a process that has imported torch and gptlite forks one for each.

    with ForkServer() as server:
        run = server.start("checkpoint.destruction.lives:live", args, output=path)
        run.kill(); code = run.wait()

The server itself computes nothing and has no threads, which a fork would lose. A function is named `module:function`;
what it returns is the exit code of its process. `wrapper` is a command that the server runs under, as `unshare ...`.

In the quick tests, the server is forked from the one that ranks are forked from (distributed/cells/run.py), which has
imported torch and gptlite, and calls unshare by itself.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from functools import cache
from multiprocessing import Pipe, forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

TESTS = Path(__file__).parents[2]
PRELOAD = (
    "gptlite.commands.train",
    "gptlite.start.pretrain",
    "gptlite.models.gpt.model",
    "checkpoint.destruction.composed",
)
PRIVATE = ("unshare", "--user", "--map-root-user", "--mount")  # a wrapper: mounts that nobody else sees
# sched.h and sys/mount.h
CLONE_NEWUSER, CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x10000000, 0x00020000, 1 << 14, 1 << 18


Process = subprocess.Popen[bytes] | BaseProcess


class Forked:
    """One process that the server has started. `output` is the file of all that it prints.

    `held` is whatever must live as long as this does.
    """

    def __init__(self, server: ForkServer, pid: int, output: Path) -> None:
        self._server, self.pid, self.output = server, pid, output
        self.held: object = None
        self._status: int | None = None

    def signal(self, number: int) -> None:
        """Sends a signal; to a process that has ended but was not waited for, which is no error."""
        if self._status is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def wait(self, timeout: float = 60) -> int:
        """The exit code, or minus the signal that ended it. Past the timeout it is killed, and TimeoutError raised."""
        if self._status is None:
            self._status = self._server.status(self.pid, timeout)
        if self._status is None:
            self.kill()
            self._status = self._server.status(self.pid, 10)
            raise TimeoutError(f"not done after {timeout} s; it printed:\n{self.text()[-3000:]}")
        return self._status

    def text(self) -> str:
        """All that it has printed."""
        return self.output.read_text(errors="replace")


class ForkServer:
    """The process that forks. Closing it kills what it has started."""

    def __init__(self, wrapper: Sequence[str] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gptlite-forks-")
        self._log = Path(self._folder.name) / "server.log"
        self._running: set[int] = set()
        self._pipe, theirs = Pipe()
        paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
        environment = {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        from distributed.cells.run import Ranks

        start = self._fork if Ranks.fork and tuple(wrapper) in ((), PRIVATE) else self._spawn
        self._process = start(wrapper, theirs, os.environ | environment)
        theirs.close()  # so that the server's end is the end of the pipe

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, function: str, *args: Any, output: Path, env: dict[str, str] | None = None) -> Forked:
        """Runs `function(*args)` in a new process, which ends with the code that it returns."""
        pid = self._ask("start", function, args, str(output), env or {})
        self._running.add(pid)
        return Forked(self, pid, output)

    def call(self, function: str, *args: Any, timeout: float = 60) -> Any:
        """The result of `function(*args)` in a new process. Raises RuntimeError with the traceback, if it raised."""
        result = Path(self._folder.name) / "result"
        result.unlink(missing_ok=True)
        run = self.start("checkpoint.destruction.forks:_store", str(result), function, args, output=self._log)
        assert run.wait(timeout) == 0, run.text()[-3000:]
        worked, value = pickle.loads(result.read_bytes())
        if not worked:
            raise RuntimeError(f"{function} failed:\n{value}")
        return value

    def status(self, pid: int, timeout: float) -> int | None:
        """How a process has ended; None if it has not."""
        deadline = time.monotonic() + timeout
        while (code := self._ask("status", pid)) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if code is not None:
            self._running.discard(pid)
        return code

    def close(self) -> None:
        """Ends all."""
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)  # not waited for yet, so the number is still its own
        self._process.kill()
        self._process.wait() if isinstance(self._process, subprocess.Popen) else self._process.join()
        self._pipe.close()
        self._folder.cleanup()

    def _spawn(self, wrapper: Sequence[str], pipe: Connection, environment: dict[str, str]) -> Process:
        with open(self._log, "wb") as log:
            return subprocess.Popen(
                [*wrapper, sys.executable, "-u", __file__, str(pipe.fileno()), str(os.getpid())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[pipe.fileno()],
            )

    def _fork(self, wrapper: Sequence[str], pipe: Connection, environment: dict[str, str]) -> Process:
        from distributed.cells.run import FORKING, PRELOADED

        FORKING.set_forkserver_preload(PRELOADED)
        with mock.patch.dict(os.environ, environment):
            forkserver.ensure_running()
        arguments = pipe, str(self._log), environment, os.getcwd(), bool(wrapper)
        process = FORKING.Process(target=_forked, args=arguments)
        process.start()
        return process

    def _ask(self, *request: Any) -> Any:
        try:
            self._pipe.send(request)
            return self._pipe.recv()
        except (EOFError, OSError):
            raise RuntimeError(f"the server has ended:\n{self._log.read_text()[-3000:]}") from None


@cache
def shared_server() -> ForkServer:
    """The one that tests share, for starting it takes seconds. It ends with this process."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def _store(result: str, function: str, args: tuple[Any, ...]) -> int:
    try:
        answer = True, _find(function)(*args)
    except BaseException:
        answer = False, traceback.format_exc()
    Path(result).write_bytes(pickle.dumps(answer))
    return 0


def _find(function: str) -> Any:
    module, name = function.split(":")
    return getattr(importlib.import_module(module), name)


def _forked(pipe: Connection, log: str, environment: dict[str, str], folder: str, private: bool) -> None:
    """The server as a process that was forked. It ends with the one that forked it, and that with its parent."""
    _die_with(os.getppid())
    multiprocessing.set_start_method(None, force=True)  # as in a new process
    _print_to(log)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if private:
        _unshare()
    _serve(pipe)


def _unshare() -> None:
    """As `unshare --user --map-root-user --mount`."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text)
    if libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "mount")


def _serve(pipe: Connection) -> None:
    for name in PRELOAD:
        importlib.import_module(name)
    while True:
        try:
            request, *details = pipe.recv()
        except EOFError:
            return
        pipe.send(_fork(pipe, *details) if request == "start" else _status(*details))


def _fork(pipe: Connection, function: str, args: tuple[Any, ...], output: str, env: dict[str, str]) -> int:
    server = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        _die_with(server)
        pipe.close()
        _print_to(output)
        os.environ.update(env)
        code = _find(function)(*args)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _print_to(path: str) -> None:
    """Appends to a file all that this process prints."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _status(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _die_with(parent: int) -> None:
    """A killed test run leaves nothing behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    _die_with(int(sys.argv[2]))
    _serve(Connection(int(sys.argv[1])))
