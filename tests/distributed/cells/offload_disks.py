"""What forked processes do in test_offload_disks.py: a run whose state file meets a disk's troubles."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Sequence
from itertools import count
from typing import Any

from checkpoint.destruction import lives

from gptlite.satellites.nvme.state_file import StateFile

SMALL = 2**16  # bytes: more than any other file that a run writes between its checkpoints, less than its state takes


def command(overrides: Sequence[str]) -> int:
    """What `python train.py` does, and its exit code."""
    import time

    from gptlite.commands.train import guarded
    from gptlite.config import load
    from gptlite.start.run import launch_command

    return guarded(lambda: launch_command(load(overrides), time.monotonic()))


def limited(overrides: Sequence[str], journal: str) -> int:
    """A life in which no file may be larger than SMALL, which every kernel sees to without a mount."""
    _forbid_large_files()
    return lives.live(overrides, journal)


def disturbed(overrides: Sequence[str], journal: str, trouble: str, at: int) -> int:
    """A life whose `at`-th write to the state file, from 0, is cut short.

    By `kill`: half of it is done, and the process is gone. By `refuse`: from here on the kernel refuses to write
    beyond SMALL bytes of any file.
    """
    write, number = StateFile._write, count()

    def writing(file: StateFile, part: tuple[int, memoryview]) -> None:
        if next(number) == at:
            if trouble == "kill":
                place, out = part
                write(file, (place, out[: len(out) // 2]))
                os.kill(os.getpid(), signal.SIGKILL)
            _forbid_large_files()
        write(file, part)

    replaced: Any = StateFile
    replaced._write = writing
    return lives.live(overrides, journal)


def _forbid_large_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
