"""`launch`, with which scripts and notebooks start a run: in this process, or in a separate process per rank."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from gptlite.config.saved import to_yaml
from gptlite.config.schema import Config, require_config
from gptlite.errors import ConfigError
from gptlite.launch.host_memory import lift
from gptlite.launch.process import environment_restored, freed_memory_kept
from gptlite.launch.starter import starter
from gptlite.progress import Console
from gptlite.start.run import alone, settled, under
from gptlite.trainer.result import Result
from gptlite.trainer.signals import SIGNALS, StopSignal

LOOK_SECONDS = 0.2
UNWIND_SECONDS = 5.0  # time for the launcher to end its ranks and delete their temporary files
ANSWER = "ended.json"
START = "from gptlite.start.child import main; main()"


class RunFailed(RuntimeError):
    """Error of a run whose rank failed, with one line on the cause. `train.log` in the run folder has the traceback."""


def launch(config: Config, *, ranks: int | None = None, handle_signals: bool = False) -> Result:
    """Train a configuration on as many ranks as its layout has, and return how the run ended.

    A single rank trains in this process. Several ranks train in separate processes, which end when this call returns or
    raises; their output is printed here. Under torchrun or srun this process is one of their ranks.

    Args:
        ranks: number of ranks, by default the layout's.
        handle_signals: SIGINT, SIGTERM and SIGUSR1 save a checkpoint and stop the run, as with `gptlite train`. By
            default no signal handler is installed, and KeyboardInterrupt ends the run without a save. True requires
            the main thread.

    Raises:
        ConfigError: the configuration cannot run here. Nothing has been written.
        RunFailed: one of several ranks failed. The exception of a single rank is raised unchanged.
    """
    started = time.monotonic()
    require_config(config)
    if ranks is not None and (not isinstance(ranks, int) or ranks < 1):
        raise ConfigError(f"ranks={ranks!r}: give a number of processes, at least 1, or leave ranks out")
    if handle_signals and threading.current_thread() is not threading.main_thread():
        raise ConfigError("handle_signals=True works only in the main thread; leave it out in other threads")
    outer = starter()
    if outer and ranks not in (None, outer.world_size):
        raise ConfigError(f"ranks={ranks}, but {outer.name} has started {outer.world_size} ranks; leave ranks out")
    config, world = settled(config, outer, ranks)
    if outer and world > 1:
        return under(outer, config, started)
    if world > 1:
        return in_processes(config, world, started, handle_signals)
    with ExitStack() as held:
        if handle_signals:
            held.enter_context(handlers_restored())
        held.enter_context(freed_memory_kept())
        held.enter_context(environment_restored())
        if config.trainer.host_memory_limit is not None:
            held.callback(lift)
        return alone(config, started, StopSignal() if handle_signals else None)


def in_processes(config: Config, world: int, started: float, handle_signals: bool) -> Result:
    """Train on ranks that a launcher process starts. Its signal handlers and settings do not affect this process."""
    with tempfile.TemporaryDirectory(prefix="gptlite-") as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        # The launcher and its ranks must find plugins where this process finds them.
        paths = os.pathsep.join(each or os.getcwd() for each in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-c", START, name, str(world), str(started), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # only this process receives Ctrl-C, and forwards it or ends the ranks
            env={**os.environ, "PYTHONPATH": paths},
        )
        assert process.stdout is not None
        with ending(process), process.stdout as output, ExitStack() as held:
            if handle_signals:
                held.enter_context(handlers_restored(lambda number: process.send_signal(number)))
            console = Console()
            for line in lines(process, output):
                console.print(line)
            process.wait()
        answer = {"reason": f"the launcher ended with exit code {process.returncode}"}
        with suppress(OSError, ValueError):
            answer = json.loads((folder / ANSWER).read_text(encoding="utf-8"))
    if refused := answer.get("refused"):
        raise ConfigError(refused)
    if reason := answer.get("reason"):
        raise RunFailed(reason)
    return Result.read(Path(config.run.dir).expanduser(), int(answer["exit_code"]))


def lines(process: subprocess.Popen, output: IO[bytes]) -> Iterator[str]:
    """Yield the output lines of a process until it has ended, even if one of its children still holds the pipe open."""
    rest = b""
    while True:
        over = process.poll() is not None  # before the read, so that no last output is missed
        if select.select([output], [], [], 0 if over else LOOK_SECONDS)[0]:
            if not (read := os.read(output.fileno(), 65536)):
                break
            *whole, rest = (rest + read).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
        elif over:
            break
    if rest:
        yield rest.decode(errors="replace")


@contextmanager
def ending(process: subprocess.Popen) -> Iterator[None]:
    """Context that ends a launcher and its ranks if the block raises an exception, including KeyboardInterrupt."""
    try:
        yield
    except BaseException:
        process.send_signal(signal.SIGHUP)  # on which the launcher ends its ranks at once, see elastic.run_once
        try:
            process.wait(UNWIND_SECONDS)
        except BaseException:  # too slow, or interrupted again; the kernel kills the ranks of a dead launcher
            process.kill()
            process.wait()
        raise


@contextmanager
def handlers_restored(receive: Callable[[int], None] | None = None) -> Iterator[None]:
    """Context that restores the handlers of SIGNALS at its end. Inside it, `receive`, if given, handles the signals."""
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def handle(number: int, frame: FrameType | None) -> None:
        assert receive is not None
        receive(number)

    try:
        for number in before if receive else ():
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
