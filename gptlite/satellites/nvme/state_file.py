"""Unnamed file for a rank's optimizer state, with direct I/O where the file system supports it.

The file has no name: it is created with O_TMPFILE or, where that is not supported, unlinked immediately. So concurrent
runs do not collide, and the kernel frees the space however the process ends. The file's blocks are allocated at
creation, so that the run is not affected if other programs fill the disk later.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from threading import Event

import torch
from torch import Tensor

from gptlite.parallelism.in_files import PAGE
from gptlite.satellites.nvme.errors import told

ALIGN = PAGE  # alignment of addresses, offsets and lengths that satisfies O_DIRECT on common disks
PIECE = 2**20  # bytes per request; up to THREADS requests run concurrently
THREADS = 8
MAPPED = 4 * 2**20  # bytes of mapped tensors that may be changed before their pages are dropped
EVERY = 0.005  # seconds between the drops of `dropping`


class StateFile:
    """File of `size` bytes in a folder, initially zero. `direct` is True if reads and writes bypass the page cache.

    Raises OSError if the folder is not writable or the disk lacks the space.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        self.bytes_read = self.bytes_written = 0
        self._changed = 0  # bytes of mapped tensors that were changed since the last drop
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - open as long as this object
        # At least one block, as an empty file cannot be mapped.
        os.posix_fallocate(self._file.fileno(), 0, max(size, ALIGN))
        self._pool = ThreadPoolExecutor(THREADS, "offload")
        self.direct = self._make_direct()

    def mapped(self) -> Tensor:
        """Return the whole file as a memory-mapped fp32 tensor.

        After `flush`, `read` returns changes made to the tensor, and the tensor shows changes made by `write`.
        """
        self._map = mmap.mmap(self._file.fileno(), max(self.size, ALIGN))
        tensor = torch.frombuffer(self._map, dtype=torch.float32)
        tensor.untyped_storage().file = self  # type: ignore[attr-defined]  # for views of the tensor, see in_files.py
        return tensor

    def flush(self) -> None:
        """Write changes made through the mapped tensor, and drop its pages."""
        self._map.flush()
        self._drop()

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Context manager in which pages are dropped soon after they were read through the mapped tensor."""
        done = Event()

        def drop() -> None:
            while not done.wait(EVERY):
                self._drop()

        with ThreadPoolExecutor(1, "offload") as thread:
            dropped = thread.submit(drop)
            try:
                yield
            finally:
                done.set()
                dropped.result()

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a copy of a view of the mapped tensor, which is not read through the mapping. Raises OffloadFailed."""
        if not tensor.numel():
            return tensor
        begin = int(tensor.storage_offset()) * tensor.itemsize
        last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
        start = begin // ALIGN * ALIGN
        memory = aligned(-(-(begin + (last + 1) * tensor.itemsize - start) // ALIGN) * ALIGN)
        with told():
            self.read([(start, memory)])
        if not self.direct:
            self._drop()
        row = torch.frombuffer(memory, dtype=tensor.dtype)
        return row.as_strided(tensor.shape, tensor.stride(), (begin - start) // tensor.itemsize)

    def changed(self, tensor: Tensor) -> None:
        """Write changes of views of the mapped tensor, and drop its pages, once they are many. Raises OffloadFailed."""
        self._changed += max(tensor.nbytes, MAPPED // 4)  # a fault reads ahead, however small the tensor is
        if self._changed >= MAPPED:
            with told():
                self.flush()

    def _drop(self) -> None:
        """Drop the pages whose contents are in the file."""
        self._changed = 0
        self._map.madvise(mmap.MADV_DONTNEED)
        # Direct writes bypass the page cache: the mapping must not keep older pages.
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill memory from the file. `parts` are pairs of byte offset and buffer, all aligned. Raises OSError."""
        list(self._pool.map(self._read, _pieces(parts)))  # list: raises the threads' exceptions here
        self.bytes_read += sum(len(memory) for _, memory in parts)

    def write(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Write memory to the file, the reverse of `read`. Raises OSError."""
        list(self._pool.map(self._write, _pieces(parts)))
        self.bytes_written += sum(len(memory) for _, memory in parts)

    def exchange(self, out: Sequence[tuple[int, memoryview]], into: Sequence[tuple[int, memoryview]]) -> None:
        """Write the buffers `out` to the file, and read `into` from the file, refilling each piece of memory as soon as
        its contents are in the file. Raises OSError.

        `out` and `into` refer to the same memory and have the same number of parts. Paired parts may differ in length.
        """
        rows = zip(out, into, strict=True)
        pairs = [pair for ours, theirs in rows for pair in zip_longest(_pieces([ours]), _pieces([theirs]))]
        list(self._pool.map(self._exchange, pairs))  # a piece is written and refilled by one thread, in this order
        self.bytes_written += sum(len(memory) for _, memory in out)
        self.bytes_read += sum(len(memory) for _, memory in into)

    def _exchange(self, pair: tuple[tuple[int, memoryview] | None, tuple[int, memoryview] | None]) -> None:
        for move, part in zip((self._write, self._read), pair, strict=True):
            if part is not None:
                move(part)

    def _read(self, part: tuple[int, memoryview]) -> None:
        place, into = part
        while len(into):  # a read may return fewer bytes than requested
            done = os.preadv(self._file.fileno(), [into], place)
            if not done:
                raise OSError(f"the optimizer state file ends at byte {place}")
            place, into = place + done, into[done:]

    def _write(self, part: tuple[int, memoryview]) -> None:
        place, out = part
        while len(out):  # a write may be partial
            done = os.pwritev(self._file.fileno(), [out], place)
            place, out = place + done, out[done:]

    def _make_direct(self) -> bool:
        descriptor, flag = self._file.fileno(), getattr(os, "O_DIRECT", 0)
        before = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, before | flag)
            os.preadv(descriptor, [aligned(ALIGN)], 0)  # only a read shows whether the file system supports it
            return bool(flag)
        except OSError:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, before)
            return False


def aligned(size: int) -> memoryview:
    """Allocate `size` bytes of page-aligned anonymous memory."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _pieces(parts: Sequence[tuple[int, memoryview]]) -> list[tuple[int, memoryview]]:
    return [
        (place + start, memory[start : start + PIECE])
        for place, memory in parts
        for start in range(0, len(memory), PIECE)
    ]
