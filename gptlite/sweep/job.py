"""One cell of a sweep, run on ranks of its own. Whatever becomes of it is a record, and the sweep goes on."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from gptlite.config import Config, typed
from gptlite.errors import ConfigError
from gptlite.launch.rank_stop import EXIT_TERMINATED, SIGNALS
from gptlite.parallelism.layout import Layout
from gptlite.sweep.begin import HERE
from gptlite.sweep.cells import prepare, this_cell
from gptlite.sweep.folder import FAILED, INTERRUPTED, OK, OUT_OF_MEMORY, PRUNED, Record, SweepFolder
from gptlite.sweep.report import publish

LONGEST_REASON = 400
LOOK_SECONDS = 0.2
# Of a cell by itself these would make a sweep again, so its folder remembers that it is one run.
SWEEPING = ("+sweep=", "experiment=")


def run_cell(raw: DictConfig) -> float | None:
    """The job that Hydra calls for each cell: runs it if it has not been, and returns its loss for a sweeper to judge.

    After a signal a job in the sweep's own process exits.
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
            print(f"cell {cell.number} ({cell.name}) is run by another process still: left to it", flush=True)
            return None
        record = folder.record(cell.number, cell.digest)
        if record is None or not record.finished:
            print(f"\ncell {cell.number} of {header.get('cells') or '?'}: {cell.name}", flush=True)
            log, before = folder.path / "records" / f"{cell.number}.log", record.wall_seconds if record else None
            with nullcontext() if here else passing_on_stops(folder):
                record = attempt(raw, cell, log, before or 0.0)
            folder.keep(record)
            publish(folder, final=False)
    if folder.deserted:  # joblib's process would wait minutes for another cell
        sys.stdout.flush()
        os._exit(EXIT_TERMINATED)
    if here and record.status == INTERRUPTED and record.exit_code:
        sys.exit(record.exit_code)
    return record.result.get("val_loss") or record.result.get("loss")


def attempt(raw: DictConfig, cell: Record, log: Path, before: float) -> Record:
    """Runs a cell, its output in `log`, and tells what came of it. `before` are the seconds of earlier attempts."""
    from gptlite.config.checks import check_world
    from gptlite.launch.elastic import Ended
    from gptlite.launch.launcher import planned, start_ranks

    started = time.monotonic()
    prepare(raw, cell)
    try:
        config, world = planned(typed(raw), None)
    except ConfigError as error:
        return told(replace(cell, run_dir=""), PRUNED, str(error))
    layout = check_world(config, world)
    cell.world_size, cell.layout = world, layout.describe(config.parallelism)
    cell.predicted = predicted(config, layout)
    sweeping = any(each.startswith(SWEEPING) for each in cell.overrides)
    config.run.overrides = [*cell.overrides, *["hydra.mode=RUN"] * sweeping]
    result = Path(cell.run_dir, "result.json")
    result.unlink(missing_ok=True)  # an earlier attempt's
    try:
        with output_in(log):
            ended = start_ranks(config, world, started)
    except ConfigError as error:
        ended = Ended(2, str(error))
    except Exception as error:  # a full disk, say: this cell's failure, not the sweep's
        traceback.print_exc()
        ended = Ended(1, f"{type(error).__name__}: {error}")
    cell.exit_code = ended.exit_code
    cell.wall_seconds = time.monotonic() - started + before
    with suppress(OSError, ValueError):
        cell.result = json.loads(result.read_text(encoding="utf-8"))
    if not result.parent.exists():  # it came to nothing before there was anything to keep
        cell.run_dir = ""
    said = cell.result.get("status", "")
    if ended.exit_code == 0:
        return told(cell, OK, said.removeprefix("done"))
    if ended.exit_code > 128:
        return told(cell, INTERRUPTED, "stopped by a signal; goes on from its checkpoint")
    if ended.out_of_memory:
        return told(cell, OUT_OF_MEMORY, ended.reason)
    # A run that ended in order says why in its result; of one that died, the launcher knows which rank was the first.
    return told(cell, FAILED, ended.reason or said.removeprefix("failed: ") or f"exit code {ended.exit_code}")


def told(record: Record, status: str, reason: str) -> Record:
    """The record with its status and reason, the reason said on the terminal."""
    record.status, record.reason = status, " ".join(reason.split())[:LONGEST_REASON]
    words = f"{status}{f': {record.reason}' if record.reason else ''}"
    print(f"cell {record.number} ({record.name}): {words}", flush=True)
    return record


def predicted(config: Config, layout: Layout) -> dict[str, Any] | None:
    """The fields of the plan's Prediction for a run on `cluster`; None where the plan knows too little of that.

    `assumed`: the vocabulary, where it is a guess, and why.
    """
    from gptlite.plan.cost import predict
    from gptlite.plan.local import this_machine
    from gptlite.plan.planning import given_keys, vocabulary_of, with_planned_vocabulary, workload_of

    def unsaid(text: str) -> None:
        """How to measure the machine is for who asks for a plan."""

    try:
        cluster = this_machine(config.cluster, unsaid, given=given_keys(config, "cluster"))
        sized, assumed = with_planned_vocabulary(config, unsaid)
        found = asdict(predict(workload_of(sized, layout, cluster), cluster))
    except ConfigError:
        return None
    return found | ({"assumed": f"vocabulary of {vocabulary_of(sized.model)}: {assumed}"} if assumed else {})


@contextmanager
def output_in(path: Path) -> Iterator[None]:
    """Standard output of this process and of those that it starts goes into a file, errors to the terminal still."""
    sys.stdout.flush()
    terminal = os.dup(1)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(terminal, 1)
        os.close(terminal)


@contextmanager
def passing_on_stops(folder: SweepFolder) -> Iterator[None]:
    """While a cell runs in a process of its own: its ranks' launcher gets SIGTERM once the sweep is to stop, or dead.

    The launcher has the signals as soon as it runs. One that comes before waits for it here. The handlers stay: of
    joblib's workers an idle one that a Ctrl-C ended would have all others killed.
    """
    asked, over = threading.Event(), threading.Event()

    def receive(number: int, frame: FrameType | None) -> None:
        asked.set()

    def watch() -> None:
        while not over.wait(LOOK_SECONDS):
            handler = signal.getsignal(signal.SIGTERM)
            if handler is not receive and (asked.is_set() or folder.stop.exists() or folder.deserted):
                launcher = getattr(handler, "__self__", None)
                if getattr(launcher, "received", None) is None:  # else Ctrl-C has reached it by itself
                    os.kill(os.getpid(), signal.SIGTERM)
                return

    for number in SIGNALS:
        signal.signal(number, receive)
    threading.Thread(target=watch, daemon=True, name="the sweep's requests").start()
    try:
        yield
    finally:
        over.set()
