"""Types of tensors while a step runs: along which axes a value differs between ranks, and where it is a partial sum.

A rank's coordinates are taken apart into *atoms*, the coarsest factors of the world of which all axes are products: the
data axis, for example, into the context axis and the rest. A type is a set of atoms, a bit for each.

Types belong to ranges of a storage, not to tensors, so that views share them, and so that parts of one buffer, such as
FSDP2's, keep types of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from gptlite.torch_private.recording import storage_key


class ValueType(NamedTuple):
    """Type of a value. `varies`: atoms along which it may differ between ranks. `unsummed`: those of them along which
    no sum has been taken since, so that the value may still be a rank's part of a sum. `zero`: the constant 0."""

    varies: int = 0
    unsummed: int = 0
    zero: bool = False

    def __or__(self, other: ValueType) -> ValueType:  # type: ignore[override]
        """Return the type of a value computed from two others."""
        if self == other:
            return self
        return ValueType(self.varies | other.varies, self.unsummed | other.unsummed, self.zero and other.zero)

    def equal_over(self, atoms: int) -> ValueType:
        """Return the type of the same value after all ranks along some atoms have been given the same one."""
        return ValueType(self.varies & ~atoms, self.unsummed & ~atoms)

    def summed_over(self, atoms: int) -> ValueType:
        """Return the type of a rank's shard of a sum over some atoms."""
        return ValueType(self.varies | atoms, self.unsummed & ~atoms)


SAME, ZERO = ValueType(), ValueType(zero=True)
Span = tuple[int, int, ValueType]  # first byte, byte after the last, type


def varying(atoms: int) -> ValueType:
    """Return the type of a value that each rank along some atoms has for itself."""
    return ValueType(atoms, atoms)


def joined(kinds: Iterable[ValueType]) -> ValueType:
    """Return the type of a value computed from some others; that of a constant without any."""
    out: ValueType | None = None
    for kind in kinds:
        out = kind if out is None else out | kind
    return SAME if out is None else out


class _Storage:
    """Types in a storage. With a `period`, the spans describe one row of that many bytes, and all rows are alike.
    `bucket`: it holds gradients on their way through a reduction."""

    __slots__ = ("alive", "bucket", "period", "spans")

    def __init__(self, alive: Any) -> None:
        self.alive, self.period, self.bucket = alive, 0, False
        self.spans: list[Span] = []


class ValueTypes:
    """Types of all tensors of a process. A tensor without a type is a constant, equal on all ranks."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}

    def of(self, tensor: Tensor) -> ValueType:
        """Return the type of a tensor: that of all its elements together."""
        return joined(kind for _, _, kind in self.spans(tensor))

    def spans(self, tensor: Tensor) -> list[Span]:
        """Return the types of the ranges of a tensor's bytes, relative to its first byte."""
        held = self._storages.get(storage_key(tensor.untyped_storage()))
        if held is None or not held.spans or not tensor.numel():
            return []
        begin, end = _extent(tensor)
        if held.period:
            if end - begin > held.period or begin // held.period != (end - 1) // held.period:
                return [(0, end - begin, joined(kind for _, _, kind in held.spans))]
            begin, end = begin % held.period, (end - 1) % held.period + 1
        if len(held.spans) == 1 and held.spans[0][0] <= begin and held.spans[0][1] >= end:
            return [(0, end - begin, held.spans[0][2])]
        return [
            (max(first, begin) - begin, min(last, end) - begin, kind)
            for first, last, kind in held.spans
            if first < end and last > begin
        ]

    def row(self, tensor: Tensor) -> list[Span] | None:
        """Return the types of a row of a tensor that fills its storage with equal rows; None for another tensor."""
        held = self._storages.get(storage_key(tensor.untyped_storage()))
        return held.spans if held is not None and held.period else None

    def set(self, tensor: Tensor, kind: ValueType) -> None:
        """Set the type of a tensor that has been written. Elements between those of a strided view keep theirs too."""
        if tensor.numel():
            begin, end = _extent(tensor)
            whole = (end - begin) == tensor.numel() * tensor.element_size()
            self._write(tensor, [(begin, end, kind if whole else kind | self.of(tensor))])

    def mark_bucket(self, tensor: Tensor) -> None:
        """Mark the storage of a tensor as a bucket of gradients."""
        self._write(tensor, []).bucket = True

    def in_bucket(self, tensor: Tensor) -> bool:
        """Return True for a tensor in such a storage."""
        held = self._storages.get(storage_key(tensor.untyped_storage()))
        return held is not None and held.bucket

    def set_spans(self, tensor: Tensor, spans: Iterable[Span], period: int = 0) -> None:
        """Set the types of ranges of a contiguous tensor's bytes, relative to its first byte. With a `period`, the
        tensor fills its storage with rows of that many bytes, and the spans are those of a row."""
        begin = int(tensor.storage_offset()) * tensor.element_size()
        held = self._write(tensor, [(begin + first, begin + last, kind) for first, last, kind in spans])
        held.period = period

    def _write(self, tensor: Tensor, spans: list[Span]) -> _Storage:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        held = self._storages.get(key)
        if held is None:
            forget = self._storages.pop
            held = self._storages[key] = _Storage(weakref.ref(storage, lambda _: forget(key, None)))
        if held.period and spans:
            held.period, held.spans = 0, []
        for begin, end, kind in spans:
            if begin == end:
                continue
            kept: list[Span] = []
            for first, last, other in held.spans:
                if last <= begin or first >= end:
                    kept.append((first, last, other))
                    continue
                if first < begin:
                    kept.append((first, begin, other))
                if last > end:
                    kept.append((end, last, other))
            held.spans = _merged([*kept, (begin, end, kind)])
        return held


def _merged(spans: list[Span]) -> list[Span]:
    """Return spans in order, adjacent ones of the same type as one."""
    out: list[Span] = []
    for span in sorted(spans, key=lambda each: each[0]):
        if out and out[-1][1] == span[0] and out[-1][2] == span[2]:
            out[-1] = (out[-1][0], span[1], span[2])
        else:
            out.append(span)
    return out


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage and the byte after its last."""
    size, offset = tensor.element_size(), tensor.storage_offset()
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(offset) * size, int(offset + reach + 1) * size
