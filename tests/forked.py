"""Python programs in processes that begin with torch and gptlite imported, which takes most of a short program's time.

    done = run("-m", "gptlite", "train", "run.dir=run", folder=folder)  # as subprocess.run with Python, capturing text

They are forked from the same process as ranks in tests (distributed/cells/run.py), and so are the ranks that they
start. In the slow tests they are new processes. A test of what Python itself does, of what a program imports, or of
another copy of gptlite needs a new process in any case.
"""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, reduction
from pathlib import Path
from types import ModuleType
from typing import IO, Any
from unittest import mock

import torch
from distributed.cells.run import FORKING, PRELOADED, TESTS, Ranks, die_with
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from gptlite.start import api

SECONDS = 240


def run(
    *words: str, folder: Path, environment: Mapping[str, str] | None = None, timeout: float = SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments. `environment`: all its variables; None: this process's."""
    popen = Popen if Ranks.fork else subprocess.Popen
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = popen([sys.executable, *words], cwd=folder, env=environment, stdout=out, stderr=err)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        texts = [os.pread(each.fileno(), os.fstat(each.fileno()).st_size, 0).decode() for each in (out, err)]
    return subprocess.CompletedProcess(words, code, *texts)


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """Have `launch` fork the launcher and the ranks that it starts."""
    if Ranks.fork:
        start_server()
    with _forking() if Ranks.fork else contextlib.nullcontext():
        yield


def start_server() -> None:
    """Start the process that programs are forked from, if it isn't running."""
    FORKING.set_forkserver_preload(PRELOADED)
    paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}):
        forkserver.ensure_running()


class Popen:
    """What is used of subprocess.Popen, for Python programs. Each has a session of its own, and nothing to read."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        **_: Any,
    ) -> None:
        start_server()
        words = list(args[1:])
        if words[-1] == str(os.getpid()):  # the process with which a rank ends: its parent, which here is the server
            words[-1] = str(forkserver._forkserver._forkserver_pid or os.getppid())  # type: ignore[attr-defined]
        self.stdout: IO[bytes] | None = None
        ours = []
        if stdout == subprocess.PIPE:
            end, out = os.pipe()
            self.stdout = os.fdopen(end, "rb", buffering=0)
            ours.append(out)
        else:
            out = 1 if stdout is None else _number(stdout)
        err = out if stderr == subprocess.STDOUT else 2 if stderr is None else _number(stderr)
        given = words, str(cwd or os.getcwd()), dict(os.environ if env is None else env)
        self._process = FORKING.Process(target=_main, args=(*given, _Descriptor(out), _Descriptor(err)))
        with mock.patch.dict(sys.modules, {"__main__": ModuleType("__main__")}):  # which is not to be imported there
            self._process.start()
        for descriptor in ours:
            os.close(descriptor)
        assert self._process.pid
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _number(file: int | IO[Any]) -> int:
    return file if isinstance(file, int) else file.fileno()


@contextlib.contextmanager
def _forking() -> Iterator[None]:
    """Fork the processes that `launch` and torch's launcher start."""
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "STDOUT")}
    with (
        mock.patch.object(api, "subprocess", mock.Mock(Popen=Popen, **names)),
        mock.patch.object(subprocess_handler, "Popen", Popen),
    ):
        yield


class _Descriptor:
    """A file descriptor that goes to the new process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (reduction.DupFd(self.number),)


def _detached(descriptor: Any) -> int:
    return descriptor.detach()


def _main(words: list[str], folder: str, environment: dict[str, str], out: int, err: int) -> None:
    """The program, in its process, which ends with the server."""
    die_with(os.getppid())
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # for the workers of a data loader; here it is forkserver
    for descriptor, standard in ((out, 1), (err, 2)):
        os.dup2(descriptor, standard)
    for descriptor in {out, err}:
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server.ensure_running = forkserver.ensure_running = lambda: None  # this process's ranks have the same parent
    flags = [word for word in words[:2] if word in ("-P", "-u")]
    words = words[len(flags) :]
    given = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    first = [] if "-P" in flags else [_first(words)]
    sys.path[:] = [*first, *given, *(each for each in sys.path if each != str(TESTS))]
    try:
        with _forking():
            _run(words)
    except SystemExit:
        raise
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()


def _first(words: list[str]) -> str:
    """The folder that Python puts first on its path."""
    return os.getcwd() if words[0] in ("-c", "-m") else str(Path(words[0]).resolve().parent)


def _run(words: list[str]) -> None:
    kind, *rest = words
    if kind == "-c":
        code, *sys.argv[1:] = rest
        sys.argv[0] = "-c"
        module = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(module))
    elif kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(kind, run_name="__main__")
