"""Real processes over gloo on this machine, for tests: started once, given many functions to run, always ended.

    ranks = Ranks(4)                                     # or `with Ranks(4) as ranks`
    results = ranks.run("distributed.cells.cases:save", path)  # save(path) on every rank: a list of 4 results
    ranks.close()

`run_ranks` does it for one function. A function is named `module:function`, found from `tests/` or the repository's
root, and what goes in and comes out is pickled. Ranks have RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* set as by torchrun
and, unless `join=False`, a gloo process group; a world of one has neither.

In the quick tests, ranks are forked from a process that has imported torch and gptlite, which costs a tenth of new
processes. In the slow and the long ones they are new processes: these iterate over sets in orders of their own, and so
find collectives whose order depends on it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import Pipe, forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist

TESTS = Path(__file__).parents[2]
GRACE = 3.0  # seconds that the others get to end by themselves after the first failure
FORKING = multiprocessing.get_context("forkserver")
PRELOADED = ["distributed.cells.preloaded"]


class RankFailed(RuntimeError):
    """The first rank that failed, with its traceback. `rank` is which; the processes are gone."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} failed:\n{text}")
        self.rank = rank


def run_ranks(world: int, function: str, *args: Any, timeout: float = 60, **options: Any) -> list[Any]:
    """Runs `function(*args)` on new ranks and returns each rank's result. Raises RankFailed, TimeoutError."""
    with Ranks(world, **options) as ranks:
        return ranks.run(function, *args, timeout=timeout)


class _Process(Protocol):
    """What is asked of a rank's process."""

    def kill(self) -> None: ...

    def end(self, seconds: float | None = None) -> int | None:
        """Its status, once it has ended."""
        ...


class _New(subprocess.Popen[bytes]):
    def end(self, seconds: float | None = None) -> int | None:
        return self.wait(seconds)


class _Forked(multiprocessing.context.ForkServerProcess):
    def end(self, seconds: float | None = None) -> int | None:
        self.join(seconds)
        return self.exitcode


class Ranks:
    """`world` processes that wait for functions. After a failure they are ended, and the next `run` starts new ones."""

    fork = False  # whether ranks without variables of their own are forked; see conftest.py

    def __init__(
        self, world: int, *, join: bool = True, collective_timeout: float = 240, env: dict[str, str] | None = None
    ) -> None:
        self.world, self.join, self.collective_timeout, self.env = world, join, collective_timeout, env or {}
        self.processes: list[_Process] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="gptlite-ranks-")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: str, *args: Any, timeout: float = 60) -> list[Any]:
        """`function(*args)` on every rank at once: their results, in the order of ranks.

        Raises RankFailed with the traceback (or the exit status and last words) of the rank that failed first, and
        TimeoutError with the ranks still at it after `timeout` seconds. No process survives either.
        """
        if not self.processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((function, args))
            return self._collect(function, timeout)
        except BaseException:
            self._end()
            raise

    def output(self, rank: int) -> str:
        """All that a rank has printed."""
        return self._log(rank).read_text(errors="replace")

    def close(self) -> None:
        """Ends the processes."""
        self._end()
        self._folder.cleanup()

    def _start(self) -> None:
        # The parent holds the store, on a port the kernel chooses: no port is guessed, none can be taken meanwhile.
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world):
            self._log(rank).touch()
        start = self._fork if self.fork and not self.env else self._spawn
        for rank in range(self.world):
            ours, theirs = Pipe()
            self.processes.append(start(rank, theirs))
            theirs.close()  # so that the death of the process is the end of the pipe
            self._pipes.append(ours)

    def _spawn(self, rank: int, pipe: Connection) -> _Process:
        options = [str(pipe.fileno()), str(os.getpid()), str(int(self.join)), str(self.collective_timeout)]
        with open(self._log(rank), "ab") as log:
            return _New(
                [sys.executable, "-u", __file__, *options],
                env=os.environ | self._environment(rank) | self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[pipe.fileno()],
            )

    def _fork(self, rank: int, pipe: Connection) -> _Process:
        """A rank from the server of this process, which is started for the first one."""
        environment = os.environ | self._environment(rank)
        FORKING.set_forkserver_preload(PRELOADED)
        with mock.patch.dict(os.environ, environment):
            forkserver.ensure_running()
        arguments = pipe, str(self._log(rank)), environment, os.getcwd(), self.join, self.collective_timeout
        process = _Forked(target=_forked, args=arguments)
        with mock.patch.dict(sys.modules, {"__main__": ModuleType("__main__")}):  # which a rank need not import again
            process.start()
        return process

    @staticmethod
    def end_server() -> None:
        """End the process that ranks are forked from, and any that is left, so that their time counts as this one's."""
        server: Any = forkserver._forkserver  # type: ignore[attr-defined]
        if server._forkserver_pid is not None:
            os.kill(server._forkserver_pid, signal.SIGKILL)  # asked to end, it waits for all that it has forked
            server._stop()

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"{rank}.log"

    def _environment(self, rank: int) -> dict[str, str]:
        paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if self.world == 1:
            return variables
        return variables | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.world),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # what torchrun says: the store is there already
        }

    def _collect(self, function: str, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[tuple[float, int, str]] = []
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < self.world and (left := deadline - time.monotonic()) > 0:
            done = set(results) | {rank for _, rank, _ in failures}
            pipes = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in done}
            for pipe in wait(list(pipes), left):
                assert isinstance(pipe, Connection)
                rank = pipes[pipe]
                try:
                    succeeded, value, when = pipe.recv()
                except (EOFError, ConnectionError):
                    status = self.processes[rank].end(GRACE)
                    succeeded, when = False, 0.0  # before any error: those of the others may follow from it
                    value = f"{function}: its process ended with status {status}\n{self.output(rank)[-4000:]}"
                if succeeded:
                    results[rank] = value
                else:
                    failures.append((when, rank, value))
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failures:
            _, rank, text = min(failures)
            raise RankFailed(rank, text)
        if len(results) < self.world:
            late = [rank for rank in range(self.world) if rank not in results]
            words = "".join(f"\n--- rank {rank} printed:\n{self.output(rank)[-2000:]}" for rank in late)
            raise TimeoutError(f"{function}: ranks {late} of {self.world} are not done after {timeout} s{words}")
        return [results[rank] for rank in range(self.world)]

    def _end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.end()
        for pipe in self._pipes:
            pipe.close()
        self.processes, self._pipes = [], []


class KeptRanks:
    """Ranks that stay from one case to the next, until a case needs another number of them."""

    def __init__(self, **options: Any) -> None:
        self.options = options  # of Ranks
        self._ranks: Ranks | None = None

    def ranks(self, world: int, at_least: bool = False) -> Ranks:
        """Those that there are, if they are `world`, or `at_least` so many; else new ones, and the others are ended."""
        if self._ranks is None or self._ranks.world < world or (self._ranks.world > world and not at_least):
            self.close()
            self._ranks = Ranks(world, **self.options)
        return self._ranks

    def close(self) -> None:
        """Ends the processes."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


class GrowingRanks(KeptRanks):
    """Kept ranks, as many of `sizes` as the largest case yet has needed.

    They join a group for each case: a function gets, after its first argument, the world and a name for that, as
    `joined` in steps.py wants them.
    """

    def __init__(self, sizes: Sequence[int] = (4, 8)) -> None:
        super().__init__(join=False)
        self.sizes = sizes

    def run(self, world: int, function: str, first: Any, *more: Any, timeout: float = 300) -> list[Any]:
        """What the first `world` ranks give. Raises as Ranks.run."""
        ranks = self.ranks(next(size for size in self.sizes if size >= world), at_least=True)
        return ranks.run(function, first, world, uuid.uuid4().hex, *more, timeout=timeout)[:world]


def _spawned() -> None:
    """A rank that is a new process."""
    descriptor, parent, join, timeout = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    die_with(parent)
    _serve(Connection(descriptor), bool(join), timeout)


def _forked(pipe: Connection, log: str, environment: dict[str, str], folder: str, join: bool, timeout: float) -> None:
    """A rank of the server, which ends with the server and that with its parent."""
    die_with(os.getppid())
    multiprocessing.set_start_method(None, force=True)  # for the workers of a data loader; here it is forkserver
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    _serve(pipe, join, timeout)


def _serve(pipe: Connection, join: bool, timeout: float) -> None:
    """One rank: runs what the pipe says until it closes."""
    torch.set_num_threads(1)
    if join and "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    while True:
        try:
            path, args = pipe.recv()
        except EOFError:
            os._exit(0)  # at once: the others may be gone already
        try:
            module, name = path.split(":")
            result = True, getattr(importlib.import_module(module), name)(*args), time.time()
        except BaseException:
            result = False, traceback.format_exc(), time.time()
        pipe.send(result)


def die_with(parent: int) -> None:
    """A killed test run leaves no ranks behind."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    _spawned()
