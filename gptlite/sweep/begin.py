"""A sweep from its first check to its last word, in the process of the command."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from gptlite.config import hydra_value
from gptlite.errors import ConfigError
from gptlite.invocation import command
from gptlite.sweep.cells import Cell, all_overrides, checked_cells, swept_keys
from gptlite.sweep.ended import HERE
from gptlite.sweep.folder import SweepFolder, refuse_unwritable
from gptlite.sweep.publish import publish
from gptlite.sweep.record import FAILED, FINISHED, INTERRUPTED, PRUNED, STATUSES, Record
from gptlite.sweep.resume import refuse_others

BASIC = "BasicSweeper"  # Hydra's own; another chooses its cells as it goes, and each is checked as it comes
ELSEWHERE = "SlurmLauncher"  # runs cells on machines that are not this one


class Sweep:
    """Making one checks every cell, and holds the folder. Raises ConfigError before anything is written."""

    def __init__(self, config: DictConfig) -> None:
        loader: ConfigLoader = GlobalHydra.instance().config_loader()
        hydra = config.hydra
        launcher, sweeper = str(hydra.launcher._target_), str(hydra.sweeper._target_)
        self.folder = SweepFolder(Path(str(hydra.sweep.dir)))
        self._concluded: int | None = None
        overrides = [str(each) for each in hydra.overrides.task]
        refuse_unwritable(self.folder.path)
        refuse_others(self.folder, overrides)
        if any(each.startswith("run.dir=") for each in overrides):
            raise ConfigError("run.dir in a sweep: its cells have folders of their own; give hydra.sweep.dir=...")
        swept = swept_keys(loader, all_overrides(config))
        known = sweeper.endswith(BASIC)
        cells = checked_cells(loader, config, swept, world=not launcher.endswith(ELSEWHERE)) if known else []
        header = {
            "name": self.folder.path.resolve().name,
            "overrides": overrides,
            "hydra": _kept(hydra.overrides.hydra),
            "swept": swept,
            "cells": len(cells) or None,
            "launcher": OmegaConf.select(config, "hydra.runtime.choices", default={}).get("hydra/launcher"),
        }
        if "started" not in self.folder.header:
            header["started"] = datetime.now(UTC).isoformat(timespec="seconds")
        from gptlite.sweep.stop import SweepSignals  # torch comes with it: not before the sweep stands

        self._signals = SweepSignals(self.folder, launcher.endswith(HERE))
        self.folder.open(header)
        self._signals.folder_is_open = True
        self._settle(cells)

    def conclude(self) -> int:
        """Says how the sweep ended, once; returns its exit code."""
        if self._concluded is None:
            publish(self.folder, final=True)
            records, expected = self.folder.records(), self.folder.header.get("cells")
            self._concluded = exit_code(records, self._signals.received)
            open_cells = [record for record in records if record.status not in FINISHED]
            if open_cells or (expected and len(records) < expected):
                where = shlex.quote(f"hydra.sweep.dir={hydra_value(str(self.folder.path))}")
                print(f"go on with:  {command('train')} -m {where}", flush=True)
        return self._concluded

    def _settle(self, cells: Sequence[Cell]) -> None:
        """Records the cells that cannot run, and says what is left to do."""
        done: Counter[str] = Counter()
        for cell in cells:
            record = self.folder.record(cell.number)
            if cell.refusal:
                self.folder.keep(_pruned(cell))
                done[PRUNED] += 1
                print(f"cell {cell.number} ({cell.name}): pruned: {cell.refusal}")
            elif record and (record.status == PRUNED or record.digest != cell.digest):
                self.folder.forget(cell.number)  # legal now, or of presets that have changed since
            elif record and record.status in FINISHED:
                done["finished before"] += 1
        self.folder.update()
        words = "".join(f", {count} {what}" for what, count in done.items())
        count = len(cells) - done.total()
        if cells:
            print(f"sweep of {len(cells)} cells in {self.folder.path}: {count} to run{words}", flush=True)


def exit_code(records: Sequence[Record], received: int | None) -> int:
    """Of a sweep: 128 + a signal's number, 1 if a cell failed, else 0; out of memory and pruned are results."""
    assert all(record.status in STATUSES for record in records)
    if received:
        return 128 + received
    codes = [record.exit_code for record in records if record.status == INTERRUPTED and record.exit_code]
    return max(codes, default=int(any(record.status == FAILED for record in records)))


def _pruned(cell: Cell) -> Record:
    return Record(cell.number, cell.name, list(cell.overrides), PRUNED, cell.refusal, digest=cell.digest)


def _kept(overrides: Sequence[str]) -> list[str]:
    """Of what was said to Hydra, that which a sweep that goes on should hear again."""
    return [each for each in overrides if not each.startswith(("hydra.sweep.dir=", "hydra.mode="))]
