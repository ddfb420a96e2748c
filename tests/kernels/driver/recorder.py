"""A backend of the kernel tests that records its calls, and what the tests expect of them, for driver.cpp.

The file, of little-endian numbers: "GPTLITE1", then for each call

- its name: u8 length, text;
- its buffers: u16 count, then for each u8 bytes of an element, a kind, u8 whether it may change, u8 offset in
  elements and u32 elements. Kinds: `f`, filled with 0xFF; `l`, followed by its bytes; `n`, followed by u32 seed and u8
  dtype, the numbers of `drawn`;
- its arguments: u32 bytes of all, then for each a kind: `i` i64; `d` f64; `0` NULL; `b` u16 buffer, u32 offset in
  bytes; `q` u8 count, i64 each; `p` u8 count, arguments; `s` u8 count of structs, then their fields, as arguments;
- its checks: u16 count, then for each u16 buffer, u8 dtype (3: bytes), u8 bytes of an element, u32 offset in bytes,
  four u32 sizes and four u32 strides in elements, then the expected elements. If they are numbers, they are fp32, and
  followed by their tolerances, in the upper half of fp32.
"""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gptlite.ops.philox import philox
from kernels import tolerances
from kernels.backends import Backend
from kernels.library import CODES
from kernels.memory import GUARD, Buffer, Memory

BYTES = 3  # the dtype of what must be equal


def drawn(seed: int, count: int) -> Tensor:
    """fp32 [count] of variance 4/3: sums of four uniform numbers of 22 bits, in units of 2^-21."""
    zero = torch.zeros(count, dtype=torch.int64)
    words = philox((torch.arange(count), zero, zero, zero), (seed, 0))
    return torch.stack(words).__rshift__(10).sum(0).sub(8388606).float() * 2**-21


@dataclass
class Call:
    """A call whose checks may still be added. `memory` keeps the addresses of its buffers from being used again."""

    memory: Memory
    head: bytes
    checks: list[bytes] = field(default_factory=list)

    def __bytes__(self) -> bytes:
        return self.head + struct.pack("<H", len(self.checks)) + b"".join(self.checks)


@dataclass
class Recorder:
    """The calls so far, and the inputs that the file need not contain, by their bytes."""

    calls: list[Call] = field(default_factory=list)
    draws: dict[tuple[torch.dtype, bytes], int] = field(default_factory=dict)
    unrecorded: list[str] = field(default_factory=list)  # checks of tensors that are in no buffer

    def normal(self, shape: Sequence[int], dtype: torch.dtype, *_: object) -> Tensor:
        """In place of the tests' `normal`: numbers that the driver can draw."""
        seed, x = len(self.draws), torch.zeros(*shape)
        x = drawn(seed, x.numel()).view(*shape).to(dtype)
        self.draws[dtype, raw(x)] = seed
        return x

    def check(
        self, what: str, actual: Tensor, expected: Tensor, terms: Tensor | float, arithmetic: float | Tensor = 1e-6
    ) -> None:
        """In place of the tests' `check`: the same, recorded."""
        tolerances.check(what, actual, expected, terms, arithmetic)
        size = tolerances.HALF_ULP[actual.dtype] * expected.abs() + torch.as_tensor(terms) * arithmetic
        wanted = expected.to(actual.dtype)  # infinite if it is for the result's dtype
        wanted = torch.where(wanted.isfinite(), expected.float(), wanted.float())
        limit = size + tolerances.TINY[actual.dtype] + (wanted.double() - expected).abs()
        bits = limit.expand_as(wanted).nan_to_num(0.0, 0.0).float().contiguous().view(torch.int32)
        limits = (bits + 0xFFFF >> 16).to(torch.int16)  # rounded up
        self.add(what, actual, CODES[actual.dtype], raw(wanted) + raw(limits))

    def same_bits(self, actual: Tensor, expected: Tensor) -> bool:
        """In place of the tests' `same_bits`, where what is expected is not of a kernel."""
        self.add("bits", actual, BYTES, raw(expected))
        return actual.shape == expected.shape and raw(actual) == raw(expected)

    def direct(self, name: str, memory: Memory, arguments: list[Buffer | int]) -> None:
        """Record a call of buffers and integers, without a call."""
        said = b"".join(
            _pointer(memory, each.pointer) if isinstance(each, Buffer) else _argument(memory, ctypes.c_int64, each)
            for each in arguments
        )
        self.start(name, memory, said)

    def start(self, name: str, memory: Memory, said: bytes) -> None:
        """Record a call with its arguments, before the buffers change."""
        buffers = b"".join(_buffer(each, self.draws) for each in memory.buffers)
        head = bytes([len(name)]) + name.encode() + struct.pack("<H", len(memory.buffers)) + buffers
        self.calls.append(Call(memory, head + struct.pack("<I", len(said)) + said))

    def add(self, what: str, actual: Tensor, code: int, content: bytes) -> None:
        """Record what a tensor in a buffer of a call must be."""
        if actual.numel() == 0:
            return
        storage = actual.untyped_storage().data_ptr()
        for call in reversed(self.calls):
            for index, buffer in enumerate(call.memory.buffers):
                if buffer.raw.data_ptr() == storage:
                    offset, lack = actual.data_ptr() - buffer.pointer, 4 - actual.dim()
                    sizes, strides = [1] * lack + list(actual.shape), [0] * lack + list(actual.stride())
                    head = struct.pack("<HBBI8I", index, code, actual.itemsize, offset, *sizes, *strides)
                    call.checks.append(head + content)
                    return
        self.unrecorded.append(what)


@dataclass(frozen=True)
class Recording(Backend):
    """A CPU's backend that records."""

    recorder: ClassVar[Recorder]

    def _run(self, function: ctypes._CFuncPtr, arguments: list, memory: Memory) -> int:
        name = function.__name__.removeprefix("gptlite_cpu_")
        said = b"".join(_argument(memory, *each) for each in zip(function.argtypes, arguments, strict=True))
        self.recorder.start(name, memory, said)
        return super()._run(function, arguments, memory)

    def dequantize_blocks(self, message: Tensor, blocks: int, bits: int, mask: Tensor | None = None) -> Tensor:
        x = super().dequantize_blocks(message, blocks, bits, mask)
        self.recorder.same_bits(x, x)  # the test compares it without the bits of NaN
        return x


def raw(tensor: Tensor) -> bytes:
    """Its elements in order."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _buffer(buffer: Buffer, draws: dict[tuple[torch.dtype, bytes], int]) -> bytes:
    x, content = buffer.tensor, raw(buffer.tensor)
    kind, more = b"l", content
    if content == b"\xff" * len(content):
        kind, more = b"f", b""
    elif (seed := draws.get((x.dtype, content))) is not None:
        kind, more = b"n", struct.pack("<IB", seed, CODES[x.dtype])
    offset = (buffer.pointer - buffer.raw.data_ptr() - GUARD) // x.itemsize
    return struct.pack("<BcBBI", x.itemsize, kind, buffer.written, offset, x.numel()) + more


def _argument(memory: Memory, kind: type, value: object) -> bytes:
    if hasattr(value, "_obj"):  # of ctypes.byref
        value = value._obj
    if isinstance(value, ctypes.Structure):
        return b"s\x01" + _fields(memory, value)
    if isinstance(value, ctypes.Array):
        count = bytes([len(value)])
        if value._type_ is ctypes.c_int64:
            return b"q" + count + struct.pack(f"<{len(value)}q", *value)
        if value._type_ is ctypes.c_void_p:
            return b"p" + count + b"".join(_argument(memory, ctypes.c_void_p, each) for each in value)
        return b"s" + count + b"".join(_fields(memory, each) for each in value)
    if kind is ctypes.c_void_p:
        return b"0" if value is None else _pointer(memory, value)
    if kind in (ctypes.c_float, ctypes.c_double):
        return b"d" + struct.pack("<d", value)
    return b"i" + struct.pack("<q", value)


def _fields(memory: Memory, value: ctypes.Structure) -> bytes:
    return b"".join(_argument(memory, kind, getattr(value, name)) for name, kind in value._fields_)


def _pointer(memory: Memory, address: int) -> bytes:
    for index, buffer in enumerate(memory.buffers):
        if buffer.pointer <= address <= buffer.pointer + buffer.size:
            return b"b" + struct.pack("<HI", index, address - buffer.pointer)
    raise ValueError("a pointer that is in no buffer")
