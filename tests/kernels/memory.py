"""Memory for a kernel's arguments, with guards around it.

A kernel that writes past a buffer's end, changes an input, leaves an output unwritten or uses what it must not read is
seen: guards and fresh outputs are filled with NaN, guards and inputs are compared after the call.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

GUARD = 1024  # bytes on either side: more than the widest unrolled vector loop writes at once
_FILL = 0xFF  # bytes of it are NaN in every float dtype, and -1 in every integer
_GUARDS = torch.full((GUARD + 64,), _FILL, dtype=torch.uint8)  # and a few elements, by which a buffer may be shifted


class Buffer:
    """A tensor between two guards. `written`: a kernel may change it."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, offset: int, written: bool) -> None:
        size = torch.Size(shape).numel() * dtype.itemsize
        self._start = GUARD + offset * dtype.itemsize
        self._end = self._start + size
        self.raw = torch.full((self._end + GUARD,), _FILL, dtype=torch.uint8)
        self.tensor = self.raw[self._start : self._end].view(dtype).view(*shape)
        self.written = written
        self._before: Tensor | None = None

    @property
    def pointer(self) -> int:
        return self.raw.data_ptr() + self._start

    @property
    def size(self) -> int:
        return self._end - self._start

    def remember(self) -> None:
        self._before = None if self.written else self.raw.clone()

    def check(self) -> None:
        if self._before is not None:
            assert torch.equal(self.raw, self._before), "an input was changed"
            return
        assert torch.equal(self.raw[: self._start], _GUARDS[: self._start]), "written before a buffer's start"
        assert torch.equal(self.raw[self._end :], _GUARDS[:GUARD]), "written past a buffer's end"


class Memory:
    """The buffers of one call, aligned but for `offsets` elements, which the buffers take in turn."""

    def __init__(self, offsets: Sequence[int] = (0,)) -> None:
        self._offsets = offsets
        self.buffers: list[Buffer] = []

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Buffer:
        """An output, or a workspace."""
        offset = self._offsets[len(self.buffers) % len(self._offsets)]
        self.buffers.append(Buffer(shape, dtype, offset, written=True))
        return self.buffers[-1]

    def copy(self, tensor: Tensor, written: bool = False) -> Buffer:
        """An input with the tensor's values; `written`: the kernel may change it."""
        buffer = self.new(tensor.shape, tensor.dtype)
        buffer.tensor.copy_(tensor)
        buffer.written = written
        return buffer

    def optional(self, tensor: Tensor | None) -> Buffer | None:
        return None if tensor is None else self.copy(tensor)

    def remember(self) -> None:
        for buffer in self.buffers:
            buffer.remember()

    def check(self) -> None:
        for buffer in self.buffers:
            buffer.check()


def argument(value: object) -> object:
    """What ctypes takes for it."""
    if isinstance(value, Buffer):
        return value.pointer
    if isinstance(value, ctypes.Structure | ctypes.Array):
        return ctypes.byref(value)
    return value
