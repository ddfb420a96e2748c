"""Execution of one cell of a sweep on separate ranks. Every outcome is recorded, and the sweep continues."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from gptlite.config.compose import typed
from gptlite.config.plugins import import_plugins
from gptlite.config.schema import Config
from gptlite.documents import checked
from gptlite.errors import ConfigError, one_line, printable
from gptlite.files import open_inside, open_regular
from gptlite.launch.rank_stop import EXIT_TERMINATED, SIGNALS
from gptlite.parallelism.layout import Layout
from gptlite.progress import counted, format_duration
from gptlite.satellites.sweep.begin import HERE
from gptlite.satellites.sweep.cells import alone, prepare, this_cell
from gptlite.satellites.sweep.folder import (
    FAILED,
    INTERRUPTED,
    OK,
    OUT_OF_MEMORY,
    PRUNED,
    PredictionFields,
    Record,
    SweepFolder,
)
from gptlite.satellites.sweep.report import publish
from gptlite.trainer.result import read_result

LONGEST_REASON = 400
LOOK_SECONDS = 0.2
TELL_SECONDS = 30.0  # between two lines on the progress of a cell
LOG_END = 4096  # bytes of a cell's log that are searched for the last step


def run_cell(raw: DictConfig) -> float | None:
    """Run a cell unless it is finished, and return its loss for the sweeper. Hydra calls this for each cell.

    Returns None if the cell has no loss or is not run. After a signal, a cell in the sweep's process exits the process.
    """
    hydra = HydraConfig.get()
    here = str(hydra.launcher._target_).endswith(HERE)
    folder = SweepFolder(Path(hydra.sweep.dir))
    header = folder.header
    cell = this_cell(hydra, raw, header.get("swept", []))
    if folder.stop.exists():
        return None
    with folder.running(cell.number) as free:
        if not free:
            words = f"{cell.title} ({cell.name}) is skipped, because another process is running it"
            print(printable(words), flush=True)
            return None
        record = folder.record(cell.number, cell.digest)
        if record is None or not record.finished:
            log, before = folder.path / "records" / f"{cell.number}.log", record.wall_seconds if record else None
            position = f"{cell.title} of {header.get('cells') or '?'}"  # some sweepers have no fixed number of cells
            print("", printable(f"{position}: {cell.name}"), sep="\n")
            print(printable(f"  to watch it: tail -f {shlex.quote(str(log))}"), flush=True)
            with folder.updating() as records:
                left = time_left(records, header.get("cells"))
            print(f"  {left}\n" if left else "", end="", flush=True)
            with nullcontext() if here else passing_on_stops(folder):
                record = attempt(raw, cell, log, before or 0.0)
            folder.keep(record)
            publish(folder, final=False, printed=record.status != INTERRUPTED)  # after a stop, the final table follows
    if folder.deserted:  # an idle joblib worker would wait for another cell for minutes
        sys.stdout.flush()
        os._exit(EXIT_TERMINATED)
    if here and record.status == INTERRUPTED and record.exit_code:
        sys.exit(record.exit_code)
    return record.result.get("val_loss") or record.result.get("loss")


def time_left(records: Sequence[Record], cells: int | None) -> str:
    """Return how long the rest of a sweep of `cells` cells will take, from the cells that have run; "" if none has."""
    took = [each.wall_seconds for each in records if each.finished and each.wall_seconds]
    left = (cells or 0) - sum(each.finished for each in records)
    if not took or left < 1:
        return ""
    return f"{counted(left, 'cell')} left, ETA {format_duration(left * sum(took) / len(took))}"


def attempt(raw: DictConfig, cell: Record, log: Path, before: float) -> Record:
    """Run a cell with its output in `log`, and return its record. `before` is the duration of earlier attempts in
    seconds."""
    from gptlite.config.batch import check_world
    from gptlite.launch.elastic import Ended
    from gptlite.start.run import settled, start_ranks

    started = time.monotonic()
    prepare(raw, cell)
    try:
        import_plugins(raw.plugins)  # needed in processes of other launchers; the sweep's process has imported them
        config, world = settled(typed(raw, cell.overrides), None)
    except ConfigError as error:
        return with_status(replace(cell, run_dir=""), PRUNED, str(error))
    layout = check_world(config, world)
    cell.world_size, cell.layout = world, layout.describe(config.parallelism)
    cell.predicted = predicted(config, layout)
    config.run.overrides = alone(cell.overrides)
    result = Path(cell.run_dir, "result.json")
    result.unlink(missing_ok=True)  # may be left from an earlier attempt
    try:
        with output_in(log), told(log):
            ended = start_ranks(config, world, started)
    except ConfigError as error:
        ended = Ended(2, str(error))
    except Exception as error:  # such as a full disk; only this cell fails, not the sweep
        traceback.print_exc()
        ended = Ended(1, one_line(error))
    cell.exit_code = ended.exit_code
    cell.wall_seconds = time.monotonic() - started + before
    cell.result = read_result(result.parent)
    if not result.parent.exists():  # the run failed before it created its folder
        cell.run_dir = ""
    status = cell.result.get("status", "")
    if ended.exit_code == 0:
        return with_status(cell, OK, status.removeprefix("done"))
    if ended.exit_code > 128:
        return with_status(cell, INTERRUPTED, "stopped by a signal; resumes from its checkpoint")
    if ended.out_of_memory:
        return with_status(cell, OUT_OF_MEMORY, ended.reason)
    # After a crash the launcher names the first failed rank; otherwise the run wrote the reason to its result.
    return with_status(cell, FAILED, ended.reason or status.removeprefix("failed: ") or f"exit code {ended.exit_code}")


def with_status(record: Record, status: str, reason: str) -> Record:
    """Return the record with its status and reason set, and print them."""
    record.status, record.reason = status, " ".join(reason.split())[:LONGEST_REASON]
    words = f"{status}{f': {record.reason}' if record.reason else ''}"
    print(printable(f"{record.title} ({record.name}): {words}"), flush=True)
    return record


def predicted(config: Config, layout: Layout) -> PredictionFields | None:
    """Return the fields of the planner's Prediction for a run on `cluster`; None if no plan can be made.

    The entry `assumed` names a guessed vocabulary size, and a cluster that has not been measured.
    """
    from gptlite.satellites.plan.cost import predict
    from gptlite.satellites.plan.local import this_machine
    from gptlite.satellites.plan.planning import given_keys, vocabulary_of, with_planned_vocabulary, workload_of

    def discard(text: str) -> None:
        """Discard a log line on the vocabulary size, which `assumed` has too."""

    hints: list[str] = []
    try:
        cluster = this_machine(config.cluster, hints.append, explicit=given_keys(config, "cluster"))
        sized, assumed = with_planned_vocabulary(config, discard)
        prediction = asdict(predict(workload_of(sized, layout, cluster), cluster))
    except ConfigError:
        return None
    if assumed:
        hints.append(f"assumed a vocabulary of {vocabulary_of(sized.model)}: {assumed}")
    return checked(prediction | {"assumed": "; ".join(hints)}, PredictionFields)


@contextmanager
def output_in(path: Path) -> Iterator[None]:
    """Redirect standard output of this process and its children to a file in the sweep's folder of records. Standard
    error is not redirected."""
    sys.stdout.flush()
    terminal = os.dup(1)
    try:
        with open_inside(path.parents[1], path, "ab") as file:
            os.dup2(file.fileno(), 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(terminal, 1)
        os.close(terminal)


@contextmanager
def told(log: Path, seconds: float = TELL_SECONDS) -> Iterator[None]:
    """Print the last step line in a cell's log to standard error, every `seconds` in which there is a new one."""
    over, last = threading.Event(), b""

    def tell() -> None:
        nonlocal last
        while not over.wait(seconds):
            with suppress(OSError), open_regular(log) as file:
                file.seek(max(0, log.stat().st_size - LOG_END))
                steps = [line for line in file.read().splitlines() if line.startswith(b"step ")]
                if steps and steps[-1] != last:
                    last = steps[-1]
                    os.write(2, f"  {printable(last.decode(errors='replace'))}\n".encode())

    thread = threading.Thread(target=tell, daemon=True, name="progress of a cell")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def passing_on_stops(folder: SweepFolder) -> Iterator[None]:
    """Send SIGTERM to the cell's launcher, in a process other than the sweep's, once the sweep is stopped or has ended.

    The launcher handles signals as soon as it runs; earlier signals are stored here until then. The handlers stay
    installed afterwards, since an idle joblib worker that is ended by Ctrl-C would make joblib kill all other workers.
    """
    asked, over = threading.Event(), threading.Event()

    def receive(number: int, frame: FrameType | None) -> None:
        asked.set()

    def watch() -> None:
        while not over.wait(LOOK_SECONDS):
            handler = signal.getsignal(signal.SIGTERM)  # `receive`, until the launcher installs its handler
            if handler is not receive and (asked.is_set() or folder.stop.exists() or folder.deserted):
                launcher = getattr(handler, "__self__", None)
                if getattr(launcher, "received", None) is None:  # else it has already received Ctrl-C itself
                    os.kill(os.getpid(), signal.SIGTERM)
                return

    for number in SIGNALS:
        signal.signal(number, receive)
    threading.Thread(target=watch, daemon=True, name="the sweep's requests").start()
    try:
        yield
    finally:
        over.set()
