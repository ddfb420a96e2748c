"""The safetensors file format, tensor by tensor: neither writing nor reading holds more than one.

The safetensors package wants all tensors at once to write a file. The format is eight bytes, little-endian, with the
length of a JSON header; the header, `{name: {"dtype", "shape", "data_offsets": [begin, end]}}`; and the data, row by
row and little-endian, offsets counted from its first byte.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from gptlite.errors import ConfigError
from gptlite.progress import Progress

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
BLOCK_BYTES = 1 << 24  # converted and written at a time
MOST_HEADER_BYTES = 100_000_000  # the package's own limit


@dataclass(frozen=True)
class Slot:
    """What a file holds under a name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return prod(self.shape) * self.dtype.itemsize


def write(path: Path, slots: Sequence[Slot], read: Callable[[Slot], Tensor], progress: Progress) -> None:
    """Writes a new file of these tensors, brought to the disk; each is asked for when its turn comes, and let go.

    `read` gives a tensor of any shape, strides and floating dtype whose elements, row by row, are the slot's; it is
    converted a block at a time. Raises ConfigError where a number becomes infinite by that, OSError for a full disk.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for slot in slots:
        offsets = [end, end := end + slot.num_bytes]
        header[slot.name] = {"dtype": names[slot.dtype], "shape": list(slot.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for slot in slots:
            _write_tensor(file, slot, read(slot), progress)
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(file: BinaryIO, slot: Slot, tensor: Tensor, progress: Progress) -> None:
    tensor = torch.atleast_1d(tensor)
    rows = max(1, BLOCK_BYTES // max(1, tensor[:1].numel() * tensor.element_size()))
    for block in tensor.split(rows):
        converted = block.to(slot.dtype)
        if (converted.isinf() & block.isfinite()).any():
            raise ConfigError(f"{slot.name} holds numbers too large for {slot.dtype}; take another dtype")
        data = converted.contiguous().reshape(-1).view(torch.uint8)
        file.write(data.numpy())  # type: ignore[arg-type]
        progress.add(len(data))


class SafetensorsFile:
    """A file's tensors by name; what `read` does not ask for stays on the disk. Raises ConfigError naming the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.slots: dict[str, Slot] = {}
        self._begin: dict[str, int] = {}
        try:
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                size = os.fstat(file.fileno()).st_size - 8 - length
                if size < 0 or length > MOST_HEADER_BYTES:
                    raise ValueError("it ends within its header")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                self._add(name, entry, 8 + length, size)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path} is no safetensors file, or a damaged one: {error}; fetch it again") from None
        if sum(slot.num_bytes for slot in self.slots.values()) != size:
            raise ConfigError(f"{path} has {size} bytes of data, its header says otherwise; fetch it again")

    def _add(self, name: str, entry: dict[str, Any], data: int, size: int) -> None:
        shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name} is of dtype {entry['dtype']}")
        slot = Slot(name, shape, DTYPES[entry["dtype"]])
        if not all(type(n) is int and n >= 0 for n in (*shape, begin)) or end - begin != slot.num_bytes or end > size:
            raise ValueError(f"{name} has no place in it")
        self.slots[name], self._begin[name] = slot, data + begin

    def read(self, name: str) -> Tensor:
        """A tensor of the file. Raises ConfigError where the file has shrunk."""
        slot = self.slots[name]
        if not slot.num_bytes:
            return torch.empty(slot.shape, dtype=slot.dtype)
        content = bytearray(slot.num_bytes)
        with open(self.path, "rb") as file:
            file.seek(self._begin[name])
            if file.readinto(content) != len(content):
                raise ConfigError(f"{self.path} ends within {name}; fetch it again")
        return torch.frombuffer(content, dtype=slot.dtype).reshape(slot.shape)
