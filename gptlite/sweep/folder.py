"""A sweep's folder and who works in it. No torch here.

sweep.json has the sweep and its records, whole at every moment; records/3.json is written by whoever ran cell 3, and
3-tensor2-zero1/ is its run folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from gptlite.errors import ConfigError
from gptlite.files import unwritable, write_whole
from gptlite.sweep.record import Record

SWEEP = "sweep.json"
VERSION = 1
LOCK, OWNER, STOP, UPDATE = ".lock", ".owner", ".stop", ".update"


class SweepFolder:
    """Reads and writes what a sweep keeps. Several processes may, each its own cell."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: TextIO | None = None

    @property
    def header(self) -> dict[str, Any]:
        """What sweep.json says of the sweep as a whole, {} where there is none. Raises ConfigError if damaged."""
        return read(self.path).get("sweep", {})

    def record(self, number: int) -> Record | None:
        """A cell's record. None if it has none, or one that cannot be read: then it runs again."""
        try:
            return Record.from_dict(json.loads(self._record(number).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def records(self) -> list[Record]:
        """Those there are, in the order of the cells."""
        numbers = sorted(int(path.stem) for path in (self.path / "records").glob("*.json") if path.stem.isdigit())
        return [record for number in numbers if (record := self.record(number))]

    def open(self, header: dict[str, Any]) -> None:
        """Makes the folder and holds it until this process ends. Raises ConfigError if another process has it."""
        where = f"hydra.sweep.dir={self.path}"
        try:
            (self.path / "records").mkdir(parents=True, exist_ok=True)
            file = (self.path / LOCK).open("a")
        except OSError as error:
            raise ConfigError(f"{where} cannot be written: {error.strerror}; give another folder") from None
        if not try_lock(file):
            raise ConfigError(f"{where}: {self.owner()} runs a sweep in it; wait, stop it, or give another folder")
        self._lock = file  # for as long as this process lives: the kernel drops the lock with it
        write_whole(self.path / OWNER, f"process {os.getpid()} on {platform.node()}\n")
        (self.path / STOP).unlink(missing_ok=True)
        self.update(header)

    def keep(self, record: Record) -> None:
        """Writes a cell's record."""
        write_whole(self._record(record.number), json.dumps(record.to_dict(), indent=2) + "\n")

    def forget(self, number: int) -> None:
        """Takes a cell's record away."""
        self._record(number).unlink(missing_ok=True)

    def update(self, changes: dict[str, Any] | None = None) -> list[Record]:
        """Writes sweep.json from the records there are, one process after the other, and returns them."""
        with self.alone(UPDATE):
            header, records = self.header | (changes or {}), self.records()
            whole = {"version": VERSION, "sweep": header, "cells": [record.to_dict() for record in records]}
            write_whole(self.path / SWEEP, json.dumps(whole, indent=2) + "\n")
        return records

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Waits for the lock file of that name, and holds it. Without locks on that file system, it holds nothing."""
        with (self.path / name).open("a") as file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def running(self, number: int) -> Iterator[bool]:
        """Holds a cell; yields whether no other process does."""
        with (self.path / "records" / f".{number}.lock").open("a") as file:
            yield try_lock(file)

    def ask_to_stop(self, number: int) -> None:
        """Tells the processes that run cells that a signal has come, and those that would that they need not."""
        write_whole(self.path / STOP, str(number))

    def asked_to_stop(self) -> int | None:
        """The signal that has come, if one has."""
        with suppress(OSError, ValueError):
            return int((self.path / STOP).read_text())
        return None

    def owner(self) -> str:
        """`process 123 on node1`: who holds the folder."""
        with suppress(OSError):
            return (self.path / OWNER).read_text(encoding="utf-8").strip()
        return "another process"

    def deserted(self) -> bool:
        """Whether the process that held the folder was of this machine, and is gone."""
        words = self.owner().split()
        if len(words) != 4 or words[3] != platform.node():
            return False
        try:
            os.kill(int(words[1]), 0)
        except ProcessLookupError:
            return True
        except (OSError, ValueError):
            pass
        return False

    def _record(self, number: int) -> Path:
        return self.path / "records" / f"{number}.json"


def read(folder: Path) -> dict[str, Any]:
    """The content of a folder's sweep.json, {} where there is none. Raises ConfigError for one that is damaged."""
    path = folder / SWEEP
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != VERSION or not isinstance(content["sweep"], dict):
            raise ValueError(f"version {content['version']}")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is damaged or of another version of gptlite: {error}; move it away, or give another folder"
        ) from None
    return content


def refuse_unwritable(folder: Path) -> None:
    """Raises ConfigError for a folder that cannot be written, or is a run's. Leaves nothing behind."""
    where = f"hydra.sweep.dir={folder}"
    if (folder / "config.yaml").exists() and not (folder / SWEEP).exists():
        raise ConfigError(f"{where} is the folder of a run; give another, or go on with the run: run.dir={folder}")
    if reason := unwritable(folder, "folder"):
        raise ConfigError(f"{where}: {reason}")


def try_lock(file: TextIO) -> bool:
    """Whether nobody else holds the file, which this process does now; also where there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
