"""File writer that computes the SHA-256 of the bytes passed to it, not of bytes read back from disk."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gptlite.errors import naming

PIECE = 1 << 22  # bytes hashed and written at a time; a multiple of any disk's block size


class HashedFile:
    """Binary file for sequential writes, hashed as it is written. The file must not exist yet.

    Hashing and the disk have about the same throughput, so one thread hashes a piece and another writes it while the
    caller fills the next. If the file system supports it, writes bypass the page cache, which would take CPU time and
    memory from training. `entry` is the file's manifest entry, set once the file is on disk.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._set_direct(True)
        self._threads, self._digest = ThreadPoolExecutor(2, "checkpoint file"), hashlib.sha256()
        # Two page-aligned buffers, as direct I/O requires: one is filled while the other is written.
        self._filling, self._sent = mmap.mmap(-1, PIECE), mmap.mmap(-1, PIECE)
        self._under_way: list[Future[None]] = []
        self._size = self._filled = 0
        self.error: OSError | None = None  # the first write error; torch's zip writer raises its own instead
        self.entry: dict[str, Any] = {}

    def write(self, data: Any) -> int:
        """Write all of a bytes-like object. Raises OSError, possibly from an earlier write."""
        if self.error is not None:
            raise self.error
        view = memoryview(data).cast("B")
        taken = 0
        while taken < len(view):
            count = min(PIECE - self._filled, len(view) - taken)
            self._filling[self._filled : self._filled + count] = view[taken : taken + count]
            self._filled += count
            self._size += count
            taken += count
            if self._filled == PIECE:
                self._send()
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._size

    def flush(self) -> None:
        """Do nothing: torch calls it after each tensor, but a flush is needed only at the end."""

    def close(self) -> None:
        """Do nothing: DCP calls it before the with block ends, and `__exit__` closes the file."""

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        """Write and sync all data, unless the block raised an exception, and close the file. Raises OSError."""
        try:
            if kind is None:
                self._wait()
                self._set_direct(False)  # the last piece may end within a block
                self._send()
                self._wait()
                with naming(self._path):
                    os.fsync(self._descriptor)
                self.entry = {"bytes": self._size, "sha256": self._digest.hexdigest()}
        finally:
            self._threads.shutdown()
            os.close(self._descriptor)

    def _send(self) -> None:
        """Submit the filled piece once the previous one is done."""
        self._wait()
        self._filling, self._sent = self._sent, self._filling
        view = memoryview(self._sent)[: self._filled]
        offset, self._filled = self._size - self._filled, 0
        self._under_way = [
            # hashlib and pwrite release the GIL, so both run in parallel with the caller
            self._threads.submit(self._digest.update, view),
            self._threads.submit(self._put, view, offset),
        ]

    def _wait(self) -> None:
        try:
            for each in self._under_way:
                each.result()
        except OSError as error:
            self.error = error
            raise

    def _put(self, view: memoryview, offset: int) -> None:
        """Write a piece at an offset. Runs in a thread."""
        while len(view):
            try:
                count = os.pwrite(self._descriptor, view, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise OSError(error.errno, error.strerror, str(self._path)) from None
                self._set_direct(False)  # the file system accepted O_DIRECT, but the write failed
                continue
            view, offset = view[count:], offset + count
            if len(view):
                self._set_direct(False)  # the rest may start within a block

    def _set_direct(self, on: bool) -> None:
        """Turn direct I/O, which bypasses the page cache, on or off. It stays off if it is unsupported."""
        self._direct = False
        flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
            self._direct = on and flag != 0
        except OSError:
            pass
