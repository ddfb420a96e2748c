"""A file for a rank's optimizer state: past the page cache where the file system can, and gone with the process.

The file has no name (O_TMPFILE, or unlinked at once where there is none), so two runs never meet, nothing of anyone
else's is ever removed, and the kernel frees the space however the process ends. Its blocks are reserved when it is
made: a disk that others fill later does not touch it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

ALIGN = 4096  # bytes: what O_DIRECT wants of addresses, offsets and lengths on every disk made so far
PIECE = 2**20  # bytes of one request; several are under way at once
THREADS = 8


class InFiles:
    """What an optimizer is besides, whose state is in files."""

    def settle(self) -> None:
        """Brings the files up to date, for someone who reads or writes the mapped tensors before the next step."""
        raise NotImplementedError

    def resident(self) -> list[Tensor]:
        """All of its state, or room for it, that takes memory."""
        raise NotImplementedError


class StateFile:
    """A file of `size` bytes in a folder, all 0. `direct`: whether reads and writes pass the page cache by.

    Raises OSError where the folder cannot be written or the disk has no such room.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        self.bytes_read = self.bytes_written = 0
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - open as long as this object
        os.posix_fallocate(self._file.fileno(), 0, max(size, ALIGN))
        self._pool = ThreadPoolExecutor(THREADS, "offload")
        self.direct = self._make_direct()

    def mapped(self) -> Tensor:
        """The whole file as live fp32 elements: memory that the kernel fills from it and may take back at any time.

        Reading and writing it is seen by `read` and `write` once `flush` was called, and sees what those have done.
        """
        self._map = mmap.mmap(self._file.fileno(), max(self.size, ALIGN))
        return torch.frombuffer(self._map, dtype=torch.float32)

    def flush(self) -> None:
        """Writes what was changed through the mapped tensor, and lets its pages go."""
        self._map.flush()
        self._map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fills memory from the file: pairs of a place in bytes and what goes there, all aligned. Raises OSError."""
        list(self._pool.map(self._read, _pieces(parts)))
        self.bytes_read += sum(len(memory) for _, memory in parts)

    def write(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """The reverse. Raises OSError."""
        list(self._pool.map(self._write, _pieces(parts)))
        self.bytes_written += sum(len(memory) for _, memory in parts)

    def exchange(self, out: Sequence[tuple[int, memoryview]], into: Sequence[tuple[int, memoryview]]) -> None:
        """Writes memory out, and fills each piece of it with something else as soon as it is written. Raises OSError.

        Both name the same memory, in as many parts, which may differ in length.
        """
        rows = zip(out, into, strict=True)
        pairs = [pair for ours, theirs in rows for pair in zip_longest(_pieces([ours]), _pieces([theirs]))]
        list(self._pool.map(self._exchange, pairs))
        self.bytes_written += sum(len(memory) for _, memory in out)
        self.bytes_read += sum(len(memory) for _, memory in into)

    def _exchange(self, pair: tuple[tuple[int, memoryview] | None, tuple[int, memoryview] | None]) -> None:
        for move, part in zip((self._write, self._read), pair, strict=True):
            if part is not None:
                move(part)

    def _read(self, part: tuple[int, memoryview]) -> None:
        place, into = part
        while len(into):
            done = os.preadv(self._file.fileno(), [into], place)
            if not done:
                raise OSError(f"the file of the optimizer's state ends at byte {place}")
            place, into = place + done, into[done:]

    def _write(self, part: tuple[int, memoryview]) -> None:
        place, out = part
        while len(out):
            done = os.pwritev(self._file.fileno(), [out], place)
            place, out = place + done, out[done:]

    def _make_direct(self) -> bool:
        descriptor, flag = self._file.fileno(), getattr(os, "O_DIRECT", 0)
        before = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, before | flag)
            os.preadv(descriptor, [aligned(ALIGN)], 0)
            return bool(flag)
        except OSError:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, before)
            return False


def aligned(size: int) -> memoryview:
    """Memory of this process's own, beginning with a page."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _pieces(parts: Sequence[tuple[int, memoryview]]) -> list[tuple[int, memoryview]]:
    return [
        (place + start, memory[start : start + PIECE])
        for place, memory in parts
        for start in range(0, len(memory), PIECE)
    ]
