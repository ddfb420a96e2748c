"""Folder of a sweep: records of its cells, and locks against concurrent processes. Does not import torch.

sweep.json holds the sweep and its records; it is replaced atomically. The process that runs the cell with number 3
writes records/3.json, and the cell's output to records/3.log.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any, Literal, Required, TypedDict

from gptlite.documents import Count, checked, read_json
from gptlite.errors import ConfigError
from gptlite.files import make_inside, open_inside, open_regular, try_lock, unwritable, write_whole
from gptlite.trainer.result import Values

OK, OUT_OF_MEMORY, PRUNED, FAILED, INTERRUPTED = "ok", "out of memory", "pruned", "failed", "interrupted"
FINISHED = (OK, OUT_OF_MEMORY, PRUNED)  # not run again when the sweep is resumed
VERSION = 1
LONGEST_OWNER = 200  # characters


class PredictionFields(TypedDict, total=False):
    """Fields of the planner's Prediction that a comparison shows."""

    step_seconds: float | None
    memory: dict[str, float]
    assumed: str


@dataclass
class Record:
    """A cell and its result. `status` is one of the five constants above, and `reason` may explain it in a line.

    `number` counts from 0. `name` gives the differences from other cells; `layout` describes the parallelism.
    `wall_seconds` is the sum over all attempts. `result` is the content of the run's result.json, {} if there is none;
    `predicted` has the fields of the planner's Prediction. `digest` is a hash of the resolved configuration, by which a
    resumed sweep recognizes its cells.
    """

    number: Count
    name: str
    overrides: list[str]
    status: str
    reason: str = ""
    run_dir: str = ""
    exit_code: int | None = None
    world_size: int | None = None
    layout: str = ""
    wall_seconds: float | None = None
    result: Values = field(default_factory=Values)
    predicted: PredictionFields | None = None
    digest: str = ""

    @property
    def finished(self) -> bool:
        """True if a resumed sweep does not run the cell again."""
        return self.status in FINISHED

    @property
    def title(self) -> str:
        """The cell in messages, which count from 1: `cell 4` for number 3."""
        return f"cell {self.number + 1}"


class _Header(TypedDict, total=False):
    overrides: Required[list[str]]
    swept: Required[list[str]]
    hydra: list[str]
    cells: Count | None


class _File(TypedDict):
    version: Literal[1]  # VERSION
    sweep: _Header


class SweepFolder:
    """Access to a sweep's folder. Several processes may use the folder at a time, each for a different cell."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stop = path / ".stop"  # created by a signal: running cells save and end, no other cell starts
        self._lock: IO[str] | None = None

    @property
    def header(self) -> dict[str, Any]:
        """The `sweep` entry of sweep.json, {} if the file does not exist. Raises ConfigError for a damaged file."""
        path = self.path / "sweep.json"
        try:
            return read_json(path, _File)["sweep"]
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} is damaged or from another version of gptlite: {error}; move it away, or give another folder"
            ) from None

    def record(self, number: int, digest: str | None = None) -> Record | None:
        """Return a cell's record. None, so that the cell runs again, if the file is missing or unreadable, or if its
        `digest` differs from the given one."""
        try:
            values = read_json(self.path / "records" / f"{number}.json", dict[str, Any])
            record = checked({each.name: values[each.name] for each in fields(Record) if each.name in values}, Record)
            return record if record.number == number and digest in (None, record.digest) else None
        except (OSError, ValueError):
            return None

    def refuse(self) -> None:
        """Raise ConfigError for a folder that cannot be written, or that is a run folder. Writes no files."""
        where = f"hydra.sweep.dir={self.path}"
        if (self.path / "config.yaml").exists() and not self.header:
            raise ConfigError(
                f"{where} is the folder of a run; give another folder, or resume the run with run.dir={self.path}"
            )
        for name in (".lock", ".update", "records"):
            if (path := self.path / name).is_symlink():
                raise ConfigError(f"{where}: {path} is a symbolic link; a sweep writes only in its folder; remove it")
        if reason := unwritable(self.path, "folder"):
            raise ConfigError(f"{where}: {reason}")

    def open(self, header: dict[str, Any]) -> None:
        """Create the folder, lock it until this process ends, and write `header` to sweep.json.

        Raises ConfigError if another process has locked the folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        make_inside(self.path, "records")
        self._lock = open_inside(
            self.path, self.path / ".lock", "a"
        )  # the kernel releases the lock when this process ends
        if try_lock(self._lock) is False:
            owner = f"hydra.sweep.dir={self.path}: {self.owner} is running a sweep in it"
            raise ConfigError(f"{owner}; wait, stop that process, or give another folder")
        self._lock.truncate(0)
        print(f"process {os.getpid()} on {platform.node()}", file=self._lock, flush=True)
        self.stop.unlink(missing_ok=True)
        with self.updating(header):
            pass

    def keep(self, record: Record) -> None:
        """Write a cell's record."""
        write_whole(self.path / "records" / f"{record.number}.json", json.dumps(asdict(record), indent=2) + "\n")

    def forget(self, number: int) -> None:
        """Delete a cell's record."""
        (self.path / "records" / f"{number}.json").unlink(missing_ok=True)

    @contextmanager
    def updating(self, header: dict[str, Any] | None = None) -> Iterator[list[Record]]:
        """Write sweep.json from the records and `header`, by default the present one, and yield the records.

        Other processes that call this wait until the block ends, except on a file system without locks.
        """
        with open_inside(self.path, self.path / ".update", "a") as file:
            try_lock(file, wait=True)
            numbers = sorted(int(path.stem) for path in (self.path / "records").glob("*.json") if path.stem.isdigit())
            records = [record for number in numbers if (record := self.record(number))]
            whole = {"version": VERSION, "sweep": header or self.header, "cells": [asdict(each) for each in records]}
            write_whole(self.path / "sweep.json", json.dumps(whole, indent=2) + "\n")
            yield records

    @contextmanager
    def running(self, number: int) -> Iterator[bool]:
        """Lock a cell during the block. Yield False if another process has locked the cell, else True."""
        with open_inside(self.path, self.path / "records" / f".{number}.lock", "a") as file:
            yield try_lock(file) is not False

    @property
    def owner(self) -> str:
        """The process that locked the folder last, such as `process 123 on node1`."""
        with open_regular(self.path / ".lock", "r", encoding="utf-8", errors="replace") as file:
            return file.read(LONGEST_OWNER).strip() or "another process"

    @property
    def deserted(self) -> bool:
        """True if the process that locked the folder last was on this machine and has ended."""
        with suppress(ValueError, PermissionError):
            _, number, _, node = self.owner.split()
            try:
                os.kill(int(number), 0)  # signal 0 only tests whether the process exists
            except ProcessLookupError:
                return node == platform.node()
        return False
