"""A new file whose SHA-256 is taken from the bytes on their way to it, not from what can be read back."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

PIECE = 1 << 22  # bytes that are hashed and written at a time; a multiple of any disk's blocks
PIECES = 4  # under way


class HashedFile:
    """Takes bytes as a binary file does, but only in a row; the file must not be there yet.

    Hashing and the disk run at about the same rate, so one thread hashes and one writes, while this one copies and
    computes. Where the file system can, writing goes past the page cache, which takes time, and memory that training
    has a use for. `done` is told the file's size and SHA-256 once it is on the disk.
    """

    def __init__(self, path: Path, done: Callable[[dict[str, Any]], None]) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._done, self._closed = done, False
        self._set_direct(True)
        self._hasher, self._writer = ThreadPoolExecutor(1, "checkpoint hash"), ThreadPoolExecutor(1, "checkpoint write")
        self._digest = hashlib.sha256()
        self._pieces = [_Piece() for _ in range(PIECES)]
        self._turn = self._size = self._filled = self._sent = 0
        self.error: OSError | None = None  # the first of writing: torch's zip writer raises another over it

    def write(self, data: Any) -> int:
        """Takes all of a bytes-like object. Raises OSError, maybe that of an earlier write."""
        view = memoryview(data).cast("B")
        taken = 0
        while taken < len(view):
            count = min(PIECE - self._filled, len(view) - taken)
            self._pieces[self._turn].memory[self._filled : self._filled + count] = view[taken : taken + count]
            self._filled += count
            taken += count
            if self._filled == PIECE:
                self._send()
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        """How many bytes were written."""
        return self._size

    def flush(self) -> None:
        """Does nothing: torch asks for it after each tensor, and only the end matters."""

    def close(self) -> None:
        """Brings all to the disk, closes the file, and tells `done` of it. Raises OSError."""
        if self._closed:
            return
        try:
            if self._filled:
                self._finish_all()
                self._set_direct(False)  # the end of a file is no whole block
                self._send()
            self._finish_all()
            os.fsync(self._descriptor)
        finally:
            self._abandon()
        self._done({"bytes": self._size, "sha256": self._digest.hexdigest()})

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self.close() if kind is None else self._abandon()

    def _send(self) -> None:
        """Hands over the piece that was filled, and waits until the next one may be."""
        piece = self._pieces[self._turn]
        view = memoryview(piece.memory)[: self._filled]
        piece.hashed = self._hasher.submit(self._digest.update, view)
        piece.written = self._writer.submit(self._put, view, self._sent)
        self._sent += self._filled
        self._turn, self._filled = (self._turn + 1) % PIECES, 0
        self._finish(self._pieces[self._turn])

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

    def _finish_all(self) -> None:
        for piece in self._pieces:
            self._finish(piece)

    def _finish(self, piece: _Piece) -> None:
        piece.hashed.result()
        try:
            piece.written.result()
        except OSError as error:
            self.error = self.error or error
            raise

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

    def _abandon(self) -> None:
        if not self._closed:
            self._closed = True
            self._hasher.shutdown()
            self._writer.shutdown()
            os.close(self._descriptor)


class _Piece:
    """Memory that starts at a page, which is what writing past the page cache asks for, and what is done with it."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, PIECE)
        self.hashed, self.written = _nothing(), _nothing()


def _nothing() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
