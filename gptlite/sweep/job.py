"""One cell of a sweep, run on ranks of its own. Whatever becomes of it is a record, and the sweep goes on."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from gptlite.config import Config, typed
from gptlite.errors import ConfigError
from gptlite.parallelism.words import layout_words
from gptlite.sweep.cells import Cell, prepare, this_cell
from gptlite.sweep.ended import Ended
from gptlite.sweep.folder import SweepFolder
from gptlite.sweep.predict import predicted
from gptlite.sweep.publish import publish
from gptlite.sweep.record import FAILED, FINISHED, INTERRUPTED, OK, OUT_OF_MEMORY, PRUNED, Record
from gptlite.sweep.stop import Listener, in_this_process

EXIT_TERMINATED = 143
LONGEST_REASON = 400
# Of a cell by itself these would make a sweep again, so its folder remembers that it is one run.
SWEEPING = ("+sweep=", "experiment=")


def run_cell(raw: DictConfig) -> float | None:
    """The job that Hydra calls for each cell: runs it if it has not been, and returns its loss for a sweeper to judge.

    Raises Ended after a signal where the job runs in the sweep's own process.
    """
    hydra = HydraConfig.get()
    folder = SweepFolder(Path(hydra.sweep.dir))
    header = folder.header
    cell = this_cell(hydra, raw, header.get("swept", []))
    end_if_deserted(folder)
    if folder.asked_to_stop() is not None:
        return None
    with folder.running(cell.number) as free:
        if not free:
            print(f"cell {cell.number} ({cell.name}) is run by another process still: left to it", flush=True)
            return None
        record = finished(folder, cell)
        if record is None:
            print(f"\ncell {cell.number} of {header.get('cells') or '?'}: {cell.name}", flush=True)
            with Listener(folder, in_this_process()):
                record = attempt(raw, cell, folder.record(cell.number))
            folder.keep(record)
            publish(folder, final=False)
    end_if_deserted(folder)
    if record.status == INTERRUPTED and record.exit_code and in_this_process():
        raise Ended(record.exit_code)
    return record.result.get("val_loss") or record.result.get("loss")


def end_if_deserted(folder: SweepFolder) -> None:
    """Ends a process that runs cells for a sweep that is gone: joblib's would wait minutes for another."""
    if folder.deserted():
        sys.stdout.flush()
        os._exit(EXIT_TERMINATED)


def finished(folder: SweepFolder, cell: Cell) -> Record | None:
    """The record of a cell that need not run again."""
    record = folder.record(cell.number)
    return record if record and record.digest == cell.digest and record.status in FINISHED else None


def attempt(raw: DictConfig, cell: Cell, before: Record | None) -> Record:
    """Runs a cell and tells what came of it. `before` is of an earlier attempt."""
    from gptlite.launch import planned, start_ranks

    started = time.monotonic()
    record = Record(cell.number, cell.name, list(cell.overrides), FAILED, digest=cell.digest)
    prepare(raw, cell)
    try:
        config, world = planned(typed(raw), None)
    except ConfigError as error:
        return told(record, PRUNED, str(error))
    describe(record, config, world)
    result = cell.run_dir / "result.json"
    result.unlink(missing_ok=True)  # an earlier attempt's
    try:
        ended = start_ranks(config, world, started)
        record.exit_code, reason, ran_out = ended.exit_code, ended.reason, ended.out_of_memory
    except ConfigError as error:
        record.exit_code, reason, ran_out = 2, str(error), False
    except Exception as error:  # a full disk, say: this cell's failure, not the sweep's
        traceback.print_exc()
        record.exit_code, reason, ran_out = 1, f"{type(error).__name__}: {error}", False
    with suppress(OSError, ValueError):
        record.result = json.loads(result.read_text(encoding="utf-8"))
    if not cell.run_dir.exists():  # it came to nothing before there was anything to keep
        record.run_dir = ""
    said = record.result.get("status", "")
    record.wall_seconds = time.monotonic() - started
    if before and before.digest == cell.digest:
        record.wall_seconds += before.wall_seconds or 0.0
    if record.exit_code == 0:
        return told(record, OK, "" if said == "done" else said)
    if record.exit_code > 128:
        return told(record, INTERRUPTED, "stopped by a signal; goes on from its checkpoint")
    if ran_out:
        return told(record, OUT_OF_MEMORY, reason)
    # A run that ended in order says why in its result; of one that died, the launcher knows which rank was the first.
    return told(record, FAILED, reason or said.removeprefix("failed: ") or f"exit code {record.exit_code}")


def describe(record: Record, config: Config, world: int) -> None:
    """Writes into a record what is known of a run before it starts."""
    from gptlite.checks import check_world

    layout = check_world(config, world)
    record.run_dir, record.world_size = config.run.dir, world
    record.layout = layout_words(config.parallelism, layout)
    record.predicted = predicted(config, layout)
    config.run.overrides = list(record.overrides)
    if any(each.startswith(SWEEPING) for each in record.overrides):
        config.run.overrides.append("hydra.mode=RUN")


def told(record: Record, status: str, reason: str) -> Record:
    """The record with its status and reason, the reason said on the terminal."""
    record.status = status
    record.reason = " ".join(reason.split())[:LONGEST_REASON]
    words = f"{status}{f': {record.reason}' if record.reason else ''}"
    print(f"cell {record.number} ({record.name}): {words}", flush=True)
    return record
