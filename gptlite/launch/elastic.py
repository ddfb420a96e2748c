"""Launcher for the ranks that train.py starts, based on torch's elastic agent: restarts, signals, failure reports."""

import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gptlite.checkpoint.config import CheckpointConfig
from gptlite.config.saved import to_yaml
from gptlite.config.schema import Config
from gptlite.errors import ConfigError, printable
from gptlite.launch.host_memory import kernel_kills, was_near
from gptlite.launch.rank_log import log_path
from gptlite.launch.rank_stop import EXIT_TERMINATED, SAME_SECONDS, SIGNALS
from gptlite.launch.rendezvous import ADDRESS, BACKEND
from gptlite.launch.worker import MEMORY

ABORTS = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)
SHOWN_LINES = 12  # of a failed rank's traceback or log
# Errors of the surviving ranks after a rank has died. Libraries have no exception type for them, so match the text.
FOLLOWS = re.compile(
    r"Dist\w*Error|gloo|NCCL|ProcessGroup|Connection (closed|reset|refused)|Broken pipe", re.IGNORECASE
)
Failures = dict[int, ProcessFailure]


@dataclass(frozen=True)
class Ended:
    """Result of a run's ranks: the exit code and, after a failure, a one-line reason and whether memory ran out.

    `killed`: a second signal, or SIGHUP, has ended the ranks at once.
    """

    exit_code: int
    reason: str = ""
    out_of_memory: bool = False
    killed: bool = False


def run_ranks(config: Config, world: int, started: float, worker: tuple[str, ...]) -> int:
    """Run a configuration on `world` new local processes and return the exit code. See `rank_ending`."""
    return rank_ending(config, world, started, worker).exit_code


def rank_ending(
    config: Config,
    world: int,
    started: float,
    worker: tuple[str, ...],
    memory: str = "",
    advise: Callable[[], Iterable[str]] = tuple,
) -> Ended:
    """Run a configuration on `world` new local processes, even if `world` is 1.

    Only rank 0 prints to the terminal. If a rank fails, the others are stopped, and all restart from the last
    checkpoint, up to `trainer.max_restarts` times. `worker` are the arguments of Python that start a rank. `memory`
    is the banner's line on memory. `advise()` returns lines that are printed if a rank runs out of memory. Raises
    ConfigError if a rank refuses the configuration.
    """
    restarts = config.trainer.max_restarts
    reason, ran_out = "", False
    with tempfile.TemporaryDirectory(prefix="gptlite-") as name, Requests(Path(name) / "stop") as requests:
        for attempt in range(restarts + 1):
            folder = Path(name) / str(attempt)  # results of an earlier attempt must not count
            folder.mkdir()
            (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
            (folder / MEMORY).write_text(memory, encoding="utf-8")
            kills = kernel_kills()  # compared after the run, to attribute a SIGKILL to the OOM killer
            failures = run_once(folder, world, requests, (*worker, str(folder), str(started), str(os.getpid())))
            results = [_result(folder, rank) for rank in range(world)]
            for result in results:
                if "refused" in result:
                    raise ConfigError(result["refused"])
            # While stopping, ranks that lose the connection to others have not failed.
            if requests.received and (requests.insisted or all(map(_follows, failures.values()))):
                return Ended(results[0].get("exit_code", 128 + requests.received), killed=requests.insisted)
            if not failures and "exit_code" in results[0]:
                return Ended(results[0]["exit_code"])
            message = blame(failures, folder, Path(config.run.dir).expanduser())
            # A library thread aborts instead of raising. The peak recorded before shows whether memory was the cause.
            near = {rank for rank in failures if was_near(folder / f"memory-{rank}", config.trainer.host_memory_limit)}
            shortage = _memory(results, failures, kernel_kills() > kills, near)
            reason, ran_out = shortage or message.splitlines()[0], bool(shortage)
            print(shortage or message, file=sys.stderr)
            if ran_out:
                print(*advise(), sep="\n", file=sys.stderr)
            if requests.received:
                break
            if attempt < restarts:
                print(f"restarting the ranks ({attempt + 1} of {restarts})", file=sys.stderr, flush=True)
                config = going_on(config)
    return Ended(1, reason, ran_out)


def run_once(folder: Path, world: int, requests: "Requests", arguments: tuple[str, ...]) -> Failures:
    """Start the ranks, wait until all have ended, and return those that failed."""
    options = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id="gptlite",
        rdzv_backend=BACKEND,
        local_addr=ADDRESS,  # the machine's own name may not resolve
        max_restarts=0,  # rank_ending restarts instead, since some failures must not be retried
        # Requests handles SIGINT, SIGTERM and SIGUSR1. A SIGHUP that nohup ignores must stay ignored.
        signals_to_handle="SIGQUIT" if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else "SIGQUIT,SIGHUP",
        logs_specs=DefaultLogsSpecs(str(folder / "agent")),
    )
    launcher = elastic_launch(options, sys.executable)
    try:
        with _silent(), requests.interrupting():
            launcher("-P", "-u", *arguments)  # -P: keep the working directory off sys.path; -u: no output buffering
    except ChildFailedError as error:
        return error.failures
    except SignalException as error:
        requests.received = requests.received or error.sigval
        requests.insisted = True
    return {}


class Requests:
    """Context manager that handles SIGNALS: the first signal writes `file`, so that the ranks save and stop.

    A second signal kills the ranks.
    """

    def __init__(self, file: Path) -> None:
        self.received: int | None = None
        self.insisted = False
        self._file, self._launching, self._since = file, False, 0.0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Requests":
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        for number in (signal.SIGQUIT, signal.SIGHUP):  # the agent replaces these handlers and does not restore them
            self._previous[number] = signal.getsignal(number)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Context in which the agent runs, so that a second signal raises SignalException, which stops every rank."""
        self._launching = True
        try:
            yield
        finally:
            self._launching = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._since = number, time.monotonic()
            # Renamed into place, since the ranks poll for the file and must not read an empty one.
            temporary = self._file.with_suffix(".new")
            temporary.write_text(str(number))
            temporary.rename(self._file)
        elif time.monotonic() - self._since > SAME_SECONDS / 2:  # else the same signal again, via the group
            self.insisted = True
            if self._launching:
                raise SignalException("second signal", signal.SIGKILL)


def going_on(config: Config) -> Config:
    """Return the configuration for restarted ranks: without `resume` and `load` if the run has written a checkpoint."""
    if not any((Path(config.run.dir).expanduser() / "checkpoints").glob("step-*")):
        return config
    fresh = CheckpointConfig()
    return replace(config, checkpoint=replace(config.checkpoint, resume=fresh.resume, load=fresh.load))


def blame(failures: Failures, folder: Path, run_dir: Path) -> str:
    """Return e.g. `rank 3 failed: ValueError: ...` for the rank that caused the failure, with its last lines of output.

    A rank's log is in `folder`, or in `run_dir` once it has been moved there.
    """
    if not failures:
        return "rank 0 ended without a result"
    first = min(failure.timestamp for failure in failures.values())

    # 0: raised an exception; 1: died without an exception; 2: lost the connection to a rank; 3: stopped by the agent.
    def order(rank: int) -> tuple[int, float]:
        failure = failures[rank]
        if error := _exception(failure):
            return (2 if FOLLOWS.search(error[0]) else 0), Path(failure.error_file).stat().st_mtime
        late = failure.timestamp > first + 1  # probably stopped by the agent after the first failure
        return (3 if late or failure.exitcode == -signal.SIGABRT else 1), failure.timestamp

    rank = min(failures, key=order)
    failure, log = failures[rank], log_path(run_dir, rank)
    early = folder / log.name
    if error := _exception(failure):
        headline, text = f"rank {rank} failed: {(error[0].splitlines() or [''])[0]}", error[1]
    else:
        headline, text = f"rank {rank} {_ending(failure.exitcode)}", ""
        if rank and failure.exitcode not in (-signal.SIGKILL, EXIT_TERMINATED):  # killed ranks print no error
            text = (early if early.exists() else log).read_text(errors="replace")
    lines = [printable(headline), *(f"  {printable(line)}" for line in text.strip().splitlines()[-SHOWN_LINES:])]
    return "\n".join([*lines, f"  its output: {log}"] if rank and not early.exists() else lines)


def _ending(exit_code: int) -> str:
    """Return the end of a sentence about a rank; a negative exit code is a signal's number."""
    if exit_code == EXIT_TERMINATED:
        exit_code = -signal.SIGTERM
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = " (out of memory? see the kernel's log)" if -exit_code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def _exception(failure: ProcessFailure) -> tuple[str, str] | None:
    """Return the exception (`ValueError: ...`) and traceback that a rank recorded, if any."""
    message: Any = failure.message  # a dict if the rank recorded an exception, else text
    return (message["message"], message["extraInfo"]["py_callstack"]) if isinstance(message, dict) else None


def _memory(results: list[dict], failures: Failures, killed: bool, near: set[int]) -> str:
    """Return a line that names the rank that ran out of memory; empty if no rank did.

    A rank ran out of memory if it reported so, if it got SIGKILL while the OOM killer ran (`killed`), or if it aborted
    `near` its limit, since a library thread cannot raise an exception.
    """
    for rank, result in enumerate(results):
        if "out_of_memory" in result:
            return f"rank {rank}: {result['out_of_memory']}"
    ended = [rank for rank, failure in failures.items() if failure.exitcode == -signal.SIGKILL]
    if ended and killed:
        return f"rank {ended[0]}: host memory ran out: killed by the kernel"
    for rank in sorted(near):
        if failures[rank].exitcode in ABORTS:
            name = signal.Signals(-failures[rank].exitcode).name
            return f"rank {rank}: host memory ran out: {name} near trainer.host_memory_limit"
    return ""


def _follows(failure: ProcessFailure) -> bool:
    """Return True if a rank probably failed only because other ranks had left, or because it was terminated."""
    if error := _exception(failure):
        return bool(FOLLOWS.search(error[0]))
    return failure.exitcode in (EXIT_TERMINATED, -signal.SIGTERM)


def _result(folder: Path, rank: int) -> dict:
    """Return the result that a rank has written, {} if it has not."""
    path = folder / f"result-{rank}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@contextmanager
def _silent() -> Iterator[None]:
    """Suppress the agent's log; the launcher prints the relevant messages itself."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
