"""Records of a checkpoint in memory: one rank's parts of a step's tensors, in a file of a shelf.

A file has records one after another, each in whole pages: a preamble, the data of the boxes, and a JSON header. The
preamble begins with MAGIC only while the record is complete. It is written last and cleared first, so a process that is
killed in between leaves a record that does not count.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from gptlite.satellites.elastic.shelf import mapped

MAGIC = b"gptlite1"
PREAMBLE = struct.Struct("<8sQQQqI")  # MAGIC; bytes of the record, of data, of the header; data's digest, header's CRC
PAGE = 4096
ALIGN = 64  # of the first byte of a box
GROWTH = 1 << 20  # a file has whole MiB, so that a header that is a few bytes longer does not map it anew
ROW = 256  # 64-bit words that are summed before weighting
SERIAL = 127 * ROW  # words that torch sums in the calling thread, whose priority may be low


@dataclass(frozen=True)
class Box:
    """Box of a tensor in a record: its offset and sizes in the whole tensor of `shape`, and its first byte in the data.
    `rank` is the rank that wrote it."""

    key: str
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    start: int
    rank: int = 0

    @property
    def nbytes(self) -> int:
        """Number of bytes of the elements."""
        return prod(self.sizes) * getattr(torch, self.dtype).itemsize

    def view(self, data: Tensor) -> Tensor:
        """Return the elements, of shape `sizes`, in the data of their record, uint8 [bytes]."""
        return data[self.start : self.start + self.nbytes].view(getattr(torch, self.dtype)).view(self.sizes)


@dataclass(frozen=True)
class Name:
    """Checkpoint to which a record belongs. `save` differs between any two runs of ranks, `world` is their number."""

    run: str
    save: str
    step: int
    world: int


@dataclass(frozen=True)
class KeptPart:
    """Complete record: the rank that wrote it, its header and its bytes, uint8, of which `digest` is not yet
    verified."""

    name: Name
    rank: int
    header: dict[str, Any]
    whole: Tensor
    data: Tensor
    digest: int

    @property
    def boxes(self) -> list[Box]:
        """Boxes of the tensors in the data."""
        return [
            Box(key, tuple(offset), tuple(sizes), tuple(shape), dtype, start, self.rank)
            for key, offset, sizes, shape, dtype, start in self.header["boxes"]
        ]

    @property
    def intact(self) -> bool:
        """True if the data have their digest. Reads all of them."""
        return digest(self.data) == self.digest


class File:
    """File of a shelf, mapped. `memory` has its bytes, uint8."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.memory = _tensor(descriptor)

    def resize(self, size: int) -> None:
        """Make the file large enough for records of `size` bytes in total. Its records become undefined."""
        size = rounded(size + PAGE, GROWTH)
        if len(self.memory) != size:
            self.memory = _tensor(self.descriptor, size)

    def clear(self) -> None:
        """Make the records incomplete."""
        for start, _ in list(self._spans()):
            self.memory[start : start + len(MAGIC)] = 0

    def begin(self, lengths: Sequence[int]) -> list[Tensor]:
        """Lay out new, incomplete records of some lengths in bytes, multiples of PAGE, and return their bytes."""
        self.clear()
        self.resize(sum(lengths))
        return self._laid(0, lengths)

    def append(self, record: Tensor) -> None:
        """Add a complete record, given by its bytes, uint8."""
        size = len(self.memory)
        used = max((start + length for start, length in self._spans()), default=0)
        if used + len(record) + PAGE > size:
            self.memory = _tensor(self.descriptor, rounded(used + len(record) + PAGE, GROWTH))
        (place,) = self._laid(used, [len(record)])
        place[len(MAGIC) :] = record[len(MAGIC) :]
        complete(place)

    def records(self) -> list[KeptPart]:
        """Return the complete records whose header is intact."""
        complete_ones = []
        for start, length in self._spans():
            whole = self.memory[start : start + length]
            if (record := read(whole)) is not None:
                complete_ones.append(record)
        return complete_ones

    def _laid(self, start: int, lengths: Sequence[int]) -> list[Tensor]:
        places = []
        for length in lengths:
            places.append(self.memory[start : start + length])
            places[-1][: PREAMBLE.size] = _bytes(PREAMBLE.pack(bytes(8), length, 0, 0, 0, 0))
            start += length
        self.memory[start : start + PREAMBLE.size] = 0  # the end
        return places

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Yield the first byte and the length of each record, complete or not."""
        start = 0
        while start + PAGE <= len(self.memory):
            _, length, *_ = _preamble(self.memory[start:])
            if length < PAGE or start + length > len(self.memory):
                return
            yield start, length
            start += length


def complete(record: Tensor) -> None:
    """Mark a record, uint8, as complete."""
    record[: len(MAGIC)] = _bytes(MAGIC)


def seal(record: Tensor, num_bytes: int, header: bytes) -> None:
    """Write the preamble and the header of a record, uint8, with `num_bytes` of data, and mark it as complete."""
    data = record[PAGE : PAGE + num_bytes]
    record[PAGE + num_bytes : PAGE + num_bytes + len(header)] = _bytes(header)
    fields = len(record), num_bytes, len(header), digest(data), zlib.crc32(header)
    record[: PREAMBLE.size] = _bytes(PREAMBLE.pack(bytes(8), *fields))
    complete(record)


def read(whole: Tensor) -> KeptPart | None:
    """Return the record of these bytes, uint8; None if it is not complete or its header is damaged."""
    magic, length, num_bytes, size, number, crc = _preamble(whole)
    end = PAGE + num_bytes
    if magic != MAGIC or length != len(whole) or end + size > length:
        return None
    text = whole[end : end + size].numpy().tobytes()
    if zlib.crc32(text) != crc:
        return None
    header = json.loads(text)
    return KeptPart(Name(**header["name"]), header["rank"], header, whole, whole[PAGE:end], number)


def header_bytes(name: Name, rank: int, boxes: str, more: Mapping[str, Any]) -> bytes:
    """Return the JSON header of a record. `boxes` are in JSON, since they are the same in each save."""
    text = json.dumps({"format": 1, "name": asdict(name), "rank": rank, **more})
    return f'{text[:-1]}, "boxes": {boxes}}}'.encode()


def record_length(num_bytes: int, header: int) -> int:
    """Return the bytes of a record with `num_bytes` of data and a header of `header` bytes."""
    return rounded(PAGE + num_bytes + header, PAGE)


def digest(data: Tensor) -> int:
    """Return a hash of bytes, uint8 [a multiple of 8 ROW], which the change of any single bit changes.

    As `gptlite.satellites.monitor.replicas.fingerprint`, but in this thread alone: 64-bit words are summed by rows of
    ROW, each sum is multiplied by another odd number, and the products are summed, modulo 2^64. It reads at the rate of
    memory, where SHA-256 takes a second per 0.4 to 2 GB.
    """
    words = data.view(torch.int64)
    rows = torch.cat([part.view(-1, ROW).sum(1) for part in words.split(SERIAL)]) if len(words) else words
    return int((rows * (2 * torch.arange(len(rows)) + 1)).sum())


def rounded(size: int, unit: int) -> int:
    """Return the least multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


def _preamble(record: Tensor) -> tuple[Any, ...]:
    return PREAMBLE.unpack(record[: PREAMBLE.size].numpy().tobytes())


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _tensor(descriptor: int, size: int | None = None) -> Tensor:
    """Map a file, after setting its size if one is given; return its bytes, uint8."""
    memory = mapped(descriptor, size)
    return torch.empty(0, dtype=torch.uint8) if memory is None else torch.frombuffer(memory, dtype=torch.uint8)
