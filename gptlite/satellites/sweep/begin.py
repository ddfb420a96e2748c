"""Control of a sweep in the command's process: checks before the first cell, signals, and the final report."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from gptlite.config.overrides import hydra_value, key_of, unquoted
from gptlite.config.plugins import as_override, named_in, refuse_foreign
from gptlite.errors import ConfigError, printable
from gptlite.invocation import command
from gptlite.progress import counted
from gptlite.satellites.sweep.cells import checked_cells, parsed_overrides, swept_keys
from gptlite.satellites.sweep.folder import FAILED, INTERRUPTED, PRUNED, Record, SweepFolder
from gptlite.satellites.sweep.report import publish

DIR = "hydra.sweep.dir"
BASIC = "BasicSweeper"  # Hydra's default; other sweepers choose cells one by one, so each is checked when it starts
HERE = "BasicLauncher"  # Hydra's default, which runs jobs in sequence in the sweep's process
# Stored overrides of Hydra that cannot run code: the values are numbers and names.
PLAIN = re.compile(r"\+{0,2}hydra[./](launcher|sweeper)((?!_target_)[\w.])*=[\w.+-]+")
FORGOTTEN = ("hydra.sweep.dir=", "hydra.mode=")  # overrides of Hydra that are not stored for a resumed sweep
ELSEWHERE = "SlurmLauncher"  # runs cells on other machines


class Sweep:
    """A running sweep. The constructor checks every cell and locks the folder, and raises ConfigError before writing
    anything.

    Afterwards the first of SIGNALS (gptlite/trainer/signals.py) stops the sweep, and a second signal ends it at once.
    While a cell runs in this process, the cell's launcher handles the signals, and then run_cell exits. Cells in other
    processes are notified by a file, and the sweep waits for them.
    """

    def __init__(self, config: DictConfig) -> None:
        loader: ConfigLoader = GlobalHydra.instance().config_loader()
        hydra = config.hydra
        launcher = str(hydra.launcher._target_)
        self.folder = SweepFolder(Path(str(hydra.sweep.dir)))
        self._code: int | None = None
        task_overrides = [str(each) for each in hydra.overrides.task]
        self.folder.refuse()
        refuse_others(self.folder, task_overrides)
        if run_dirs := [each for each in task_overrides if each.startswith("run.dir=")]:
            raise ConfigError(
                f"{run_dirs[0]} is for a single run; give {DIR}=... instead, in which each cell gets a folder"
            )
        overrides = parsed_overrides(loader, config)
        known = str(hydra.sweeper._target_).endswith(BASIC)
        # Cells on other machines are not checked against this machine's GPUs and disks.
        cells = checked_cells(loader, config, overrides, not launcher.endswith(ELSEWHERE)) if known else []
        from gptlite.launch.rank_stop import SAME_SECONDS, SIGNALS  # imports torch, so only once the sweep is valid

        self._received: int | None = None
        self._since, self._same, self._by_file = 0.0, SAME_SECONDS, False
        for number in SIGNALS:
            signal.signal(number, self._receive)
        started = {"started": datetime.now(UTC).isoformat(timespec="seconds")}
        self.folder.open(started | self.folder.header | {
            "name": self.folder.path.resolve().name,
            "overrides": task_overrides,
            "hydra": [each for each in hydra.overrides.hydra if not each.startswith(FORGOTTEN)],
            "swept": swept_keys(overrides),
            "cells": len(cells) or None,
            "launcher": OmegaConf.select(config, "hydra.runtime.choices", default={}).get("hydra/launcher"),
        })  # fmt: skip
        self._by_file = not launcher.endswith(HERE)
        self._settle(cells)

    def conclude(self) -> int:
        """Publish the final report, on the first call only. Return the sweep's exit code."""
        if self._code is None:
            records, expected = publish(self.folder, final=True), self.folder.header.get("cells")
            self._code = exit_code(records, self._received)
            if not all(record.finished for record in records) or len(records) < (expected or 0):
                words = [f"{DIR}={hydra_value(str(self.folder.path))}"]
                if plugins := named_in(self.folder.header["overrides"]):
                    words.append(as_override(plugins))
                print(printable(f"continue:    {command('train')} -m {shlex.join(words)}"), flush=True)
        return self._code

    def _settle(self, cells: Sequence[Record]) -> None:
        """Record the cells that cannot run, and print the number of cells that remain to be run."""
        done: Counter[str] = Counter()
        for cell in cells:
            record = self.folder.record(cell.number, cell.digest)
            if cell.status == PRUNED:
                self.folder.keep(replace(cell, run_dir=""))
                done[PRUNED] += 1
                print(printable(f"{cell.title} ({cell.name}): pruned: {cell.reason}"))
            elif not record or record.status == PRUNED:
                self.folder.forget(cell.number)  # the presets have changed since then, or the cell has become legal
            else:
                done["already finished"] += record.finished
        skipped = "".join(f", {count} {what}" for what, count in done.items() if count)
        if cells:
            where = f"sweep of {counted(len(cells), 'cell')} in {self.folder.path}"
            one = "; no key has several values, as in optimizer.lr=1e-3,3e-3" if not self.folder.header["swept"] else ""
            print(printable(f"{where}: {len(cells) - done.total()} to run{skipped}{one}"), flush=True)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received, self._since = number, time.monotonic()
            if not self._by_file:
                sys.exit(128 + number)
            self.folder.stop.touch()
            os.write(2, b"\nstopping: running cells save and end, and no others start (again: end at once)\n")
        elif time.monotonic() - self._since > self._same / 2:  # else the same signal again, via the process group
            sys.exit(128 + number)


def exit_code(records: Sequence[Record], received: int | None) -> int:
    """Return a sweep's exit code: 128 + a signal's number, 1 if a cell failed, else 0.

    Out-of-memory and pruned cells are not failures. `received` is the signal that stopped the sweep, if any.
    """
    if received:
        return 128 + received
    codes = [record.exit_code for record in records if record.status == INTERRUPTED and record.exit_code]
    return max(codes, default=int(any(record.status == FAILED for record in records)))


def sweep_overrides(arguments: list[str]) -> list[str]:
    """Return the overrides of a sweep: the given ones, or those stored with the sweep in `hydra.sweep.dir`.

    `run.dir` is read as hydra.sweep.dir, and `sweep=` as `+sweep=`. Raises ConfigError if the folder holds a sweep with
    other overrides, if it holds no sweep and no overrides are given, if a stored override may run code, or if the
    stored overrides need plugins that have not been imported.
    """
    arguments = [f"+{each}" if each.startswith("sweep=") else each for each in arguments]
    named = DIR if any(key_of(each) == DIR for each in arguments) else "run.dir"
    where = [unquoted(each.partition("=")[2]) for each in arguments if key_of(each) == named]
    if not where:
        return arguments
    folder = SweepFolder(Path(where[-1]).expanduser())
    others = [each for each in arguments if key_of(each) != named]
    task = [each for each in others if not key_of(each).startswith(("hydra.", "hydra/"))]
    hydra = [*(each for each in others if each not in task), f"{DIR}={hydra_value(str(folder.path))}"]
    header = folder.header
    if not header and not task:
        raise ConfigError(f"{DIR}={where[-1]} holds no sweep to continue; give overrides to start a sweep there")
    if header and all(key_of(each) == "plugins" for each in task):
        refuse_foreign(header["overrides"], where[-1])
    elif task:
        refuse_others(folder, task)
    given = {key_of(each) for each in hydra}
    # Launchers have different keys, so a new `hydra/launcher` also drops a stored `hydra.launcher.n_jobs`.
    groups = {key: "/".join(key.split(".")[:2]) for key in map(key_of, header.get("hydra", []))}
    kept = [each for each in header.get("hydra", []) if not {key_of(each), groups[key_of(each)]} & given]
    for each in kept:
        if not PLAIN.fullmatch(each):
            raise ConfigError(
                f"{DIR}={where[-1]}: the stored override {each!r:.80} may run code; "
                "give it again on the command line to permit it"
            )
    return [*header.get("overrides", task), *kept, *hydra]


def refuse_others(folder: SweepFolder, overrides: list[str]) -> None:
    """Raise ConfigError if the folder holds a sweep with other overrides."""
    if not (header := folder.header):
        return
    old, new = ({key_of(each): each for each in them} for them in (header["overrides"], overrides))
    for key in [*old, *new]:
        if old.get(key) != new.get(key):
            was, now = (each.get(key, f"no {key}") for each in (old, new))
            raise ConfigError(
                f"{DIR}={folder.path} holds another sweep, with {was} instead of {now}; "
                f"give only {DIR} to continue that sweep, or give another folder"
            )
