"""Rank of an elastic run: a process that trains in one world after another, as its node's keeper tells it."""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from gptlite.config.saved import from_yaml
from gptlite.config.schema import Config
from gptlite.errors import ConfigError, one_line, print_refusal, printable
from gptlite.files import write_whole
from gptlite.launch.elastic import FOLLOWS
from gptlite.launch.host_memory import lift, limit, limit_words, out_of_memory
from gptlite.launch.process import environment_restored
from gptlite.launch.rank_log import RankLog
from gptlite.launch.starter import Starter, starter
from gptlite.launch.worker import note_failure
from gptlite.satellites.elastic.attendance import Attendance
from gptlite.satellites.elastic.meeting import Meeting
from gptlite.satellites.elastic.proxy import SIGNALS, VARIABLES
from gptlite.satellites.elastic.roster import Pulse
from gptlite.satellites.elastic.shelf import Shelf
from gptlite.torch_private.distributed import abandon_groups, forget_meshes
from gptlite.trainer.signals import StopSignal


@dataclass(frozen=True)
class RankTask:
    """Message of a worker: the variables of its launcher, and with our launcher the arguments of a worker.

    `words` are its command line. `ended` says when and how an earlier process of this rank has ended, None if it has
    not.
    """

    variables: dict[str, str]
    arguments: list[str]
    words: list[str]
    ended: dict[str, Any] | None


@dataclass(frozen=True)
class RankRun:
    """Functions of gptlite/start/elastic.py for a rank: training in a world, and prediction of its memory."""

    train: Callable[..., int]
    predict: Callable[[Config, Path | None, int], str]


class Control:
    """Connection to the keeper, which a thread reads: tasks, and the request to leave a world."""

    def __init__(self, connection: socket.socket, attendance: Attendance) -> None:
        self._connection, self._attendance = connection, attendance
        self._tasks: queue.SimpleQueue[tuple[RankTask, list[int]]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True, name="keeper's tasks").start()

    def next(self) -> tuple[RankTask, list[int]]:
        """Wait for the next task, and return it with the descriptors of the worker's output."""
        return self._tasks.get()

    def done(self, code: int) -> None:
        """Tell the keeper that this rank has left its world."""
        self._connection.sendall(b"%d\n" % code)

    def _read(self) -> None:
        rest, descriptors = b"", []
        while True:
            part, fds, _, _ = socket.recv_fds(self._connection, 65536, 2)
            if not part:
                os._exit(1)  # the keeper has ended
            rest, descriptors = rest + part, [*descriptors, *fds]
            *lines, rest = rest.split(b"\n")
            for message in map(json.loads, lines):
                if message == "leave":
                    self._attendance.leave("a worker has ended")
                else:
                    self._tasks.put((RankTask(**message), descriptors))
                    descriptors = []


class RankStop(StopSignal):
    """StopSignal that ignores signals at its end: a rank that leaves its world must come back in the same process."""

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def serve(control: socket.socket, shelf: Shelf, pulse: int, run: RankRun, text: str) -> NoReturn:
    """Train in the worlds that the keeper tells, until it ends. `text` is the configuration of a run that torchrun has
    started."""
    attendance = Attendance(shelf, Pulse(pulse))
    link = Control(control, attendance)
    while True:
        task, descriptors = link.next()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)  # ends a rank that does not train yet
        send_output(descriptors)
        with environment_restored():
            for name in [name for name in os.environ if name.startswith(VARIABLES)]:
                del os.environ[name]
            os.environ.update(task.variables)
            sys.orig_argv = task.words  # for printed commands
            attendance.enter()
            code = Start(task, shelf, attendance, run).run(text)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            unwind()
            attendance.left()
        send_output([os.open(os.devnull, os.O_RDWR)] * 2)
        link.done(code)


def send_output(descriptors: list[int]) -> None:
    """Send standard output and standard error to two descriptors, which are closed."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor, standard in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, standard)
    for descriptor in set(descriptors):
        os.close(descriptor)


def unwind() -> None:
    """Leave the process groups, and free what a run has left behind."""
    abandon_groups()
    forget_meshes()
    gc.collect()


class Start:
    """One world of a rank: it meets the others, trains, and leaves. `run` returns the exit code of the worker."""

    def __init__(self, task: RankTask, shelf: Shelf, attendance: Attendance, run: RankRun) -> None:
        self._task, self._shelf, self._attendance, self._run = task, shelf, attendance, run
        self._folder = Path(task.arguments[0]) if task.arguments else None  # of our launcher
        self._started = float(task.arguments[1]) if task.arguments else time.monotonic()
        if task.ended is not None:
            attendance.gone = task.ended["why"]
            attendance.note_loss("", task.ended["time"])

    def run(self, text: str) -> int:
        """Train in this world. Errors are printed and reported as by other ranks, see launch/worker.py."""
        node = starter()
        assert node is not None
        log = None
        if node.rank:
            log = RankLog(self._log_path(node.rank), node.rank)
        if self._folder is not None:
            text = (self._folder / "config.yaml").read_text(encoding="utf-8")
        config = None
        try:
            config = from_yaml(text, imports=True)
            code = self._world(config, node, log)
            self._conclude(node, exit_code=code)
        except ConfigError as error:
            self._conclude(node, refused=str(error))
            if self._folder is None and not node.rank:
                print_refusal(error)
            code = 2 if self._folder is None else 0
        except BaseException as error:
            code = self._failed(error, node, log, config)
        finally:
            if log:
                os.close(log.terminal)
                if self._is_temporary(log):
                    log.path.unlink(missing_ok=True)  # of a world that has not opened the run folder
        return 0 if self._folder is not None and code > 128 else code

    def _world(self, config: Config, node: Starter, log: RankLog | None) -> int:
        first, memory = not self._attendance.pulse.read()[0], ""
        if node.rank == 0 and first:  # now, as the simulation needs a process without a group
            memory = self._run.predict(config, self._folder, node.world_size)
        with Meeting(config, node, self._shelf, self._attendance) as meeting:
            if not meeting.active:
                return meeting.wait()
            config = meeting.config

            def opened(run_dir: Path) -> None:
                if log:
                    log.move(run_dir)

            limit(config.trainer.host_memory_limit)
            code = self._run.train(
                self._folder,
                config,
                self._started,
                RankStop(),
                opened if log else None,
                memory=memory,
                shelf=self._shelf,
                attendance=self._attendance,
            )
            meeting.over(code)
            return code

    def _failed(self, error: BaseException, node: Starter, log: RankLog | None, config: Config | None) -> int:
        """Report an exception, and return the exit code 1. First of all, this rank departs from the others."""
        self._attendance.depart("")
        reason = out_of_memory(error) if isinstance(error, Exception) else None
        lift()  # the report needs memory
        limited = limit_words(config.trainer.host_memory_limit if config else None)
        follows = bool(FOLLOWS.search(f"{type(error).__name__}: {error}"))
        self._attendance.note_loss(one_line(error).split(" [")[0] if not follows else "")
        if reason:
            self._conclude(node, out_of_memory=reason + limited)
        note_failure(error)
        if log or not follows:
            traceback.print_exception(error)
        if not log or not follows:
            lost = f"rank {node.rank} has lost the others"
            line = f"error: {reason}{limited}" if reason else lost if follows else one_line(error)
            print(printable(line), file=sys.stderr, flush=True)
            if log and self._folder is None and self._is_temporary(log):  # which is removed
                log.tell(f"rank {node.rank}: {line}")
        traceback.clear_frames(error.__traceback__)  # they hold the model
        return 1

    def _conclude(self, node: Starter, **result: object) -> None:
        """Write the result that our launcher reads."""
        if self._folder is not None:
            write_whole(self._folder / f"result-{node.rank}.json", json.dumps(result))

    def _is_temporary(self, log: RankLog) -> bool:
        return log.path.parent == self._log_path(0).parent

    def _log_path(self, rank: int) -> Path:
        folder = self._folder or Path(os.environ.get("TMPDIR", "/tmp"))
        return folder / (f"rank-{rank}.log" if self._folder else f"gptlite-rank-{os.getpid()}-{rank}.log")
