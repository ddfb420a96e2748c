"""A new file whose SHA-256 is taken from the bytes on their way to it, not from what can be read back."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

PIECE = 1 << 22  # bytes that are hashed and written at a time; a multiple of any disk's blocks


class HashedFile:
    """Takes bytes as a binary file does, but only in a row; the file must not be there yet.

    Hashing and the disk run at about the same rate, so one thread hashes and one writes a piece, while this one fills
    the next. Where the file system can, writing goes past the page cache, which takes time, and memory that training
    has a use for. `entry` is the file's in a manifest, once it is closed and on the disk.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._set_direct(True)
        self._threads, self._digest = ThreadPoolExecutor(2, "checkpoint file"), hashlib.sha256()
        # Memory that starts at a page, which is what writing past the page cache asks for: filled, and under way.
        self._filling, self._sent = mmap.mmap(-1, PIECE), mmap.mmap(-1, PIECE)
        self._under_way: list[Future[None]] = []
        self._size = self._filled = 0
        self.error: OSError | None = None  # the first of writing: torch's zip writer raises another over it
        self.entry: dict[str, Any] = {}

    def write(self, data: Any) -> int:
        """Takes all of a bytes-like object. Raises OSError, maybe that of an earlier write."""
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
        """How many bytes were written."""
        return self._size

    def flush(self) -> None:
        """Does nothing: torch asks for it after each tensor, and only the end matters."""

    def close(self) -> None:
        """Does nothing: DCP asks for it before the block is over, whose end does what is left."""

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        """Brings all to the disk, if nothing has gone wrong, and closes the file. Raises OSError."""
        try:
            if kind is None:
                self._wait()
                self._set_direct(False)  # the end of a file is no whole block
                self._send()
                self._wait()
                os.fsync(self._descriptor)
                self.entry = {"bytes": self._size, "sha256": self._digest.hexdigest()}
        finally:
            self._threads.shutdown()
            os.close(self._descriptor)

    def _send(self) -> None:
        """Hands over the piece that was filled, once the one before is done."""
        self._wait()
        self._filling, self._sent = self._sent, self._filling
        view = memoryview(self._sent)[: self._filled]
        offset, self._filled = self._size - self._filled, 0
        self._under_way = [
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
        """In the writer's thread."""
        while len(view):
            try:
                count = os.pwrite(self._descriptor, view, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._set_direct(False)  # it said it could
                continue
            view, offset = view[count:], offset + count
            if len(view):
                self._set_direct(False)  # what is left may be no whole block

    def _set_direct(self, on: bool) -> None:
        """Past the page cache, or not; where there is no such thing, not."""
        self._direct = False
        flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
            self._direct = on and flag != 0
        except OSError:
            pass
