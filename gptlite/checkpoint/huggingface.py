"""Weights in a Hugging Face folder: one safetensors file, several with an index, or a pickle (an older format).

The safetensors package needs all tensors in memory to write a file; this module has at most one in memory. A file
consists of eight bytes, little-endian, with the length of a JSON header; the header, `{name: {"dtype", "shape",
"data_offsets": [begin, end]}}`; and the data, row-major and little-endian. Offsets count from the first byte of the
data.
"""

import json
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypedDict

import torch
from torch import Tensor

from gptlite import documents
from gptlite.errors import ConfigError, naming, system_error
from gptlite.files import open_regular, refuse_special, write_synced
from gptlite.progress import Log, Progress

SINGLE, INDEX, PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
BLOCK_BYTES = 1 << 24  # bytes converted and written at a time
MOST_HEADER_BYTES = 100_000_000  # the safetensors package's limit


class _Entry(TypedDict):
    dtype: str
    shape: list[documents.Count]
    data_offsets: Annotated[list[documents.Count], documents.Between(2, 2)]


@dataclass(frozen=True)
class Stored:
    """Tensor of a weights file, existing or to be written: its name in the file, and a function that reads it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Size in the file, in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def write_weights(folder: Path, tensors: Sequence[Stored], max_shard_bytes: int, log: Log) -> None:
    """Write tensors into one file, or into several with an index if they exceed `max_shard_bytes`.

    Tensors are read one at a time and released once written. `read` may return any shape, strides and floating dtype;
    its elements are stored in row-major order. Raises ConfigError if a finite value overflows when converted, OSError
    for a full disk.
    """
    progress = Progress("export", sum(tensor.num_bytes for tensor in tensors), log)
    shards: list[list[Stored]] = [[]]
    size = 0
    for tensor in tensors:  # in order; a tensor larger than a shard gets its own shard
        if shards[-1] and size + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    if len(shards) == 1:
        _write(folder / SINGLE, tensors, progress)
        return
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / name, shard, progress)
        where |= {tensor.name: name for tensor in shard}
    index = {"metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)}, "weight_map": where}
    write_synced(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _write(path: Path, tensors: Sequence[Stored], progress: Progress) -> None:
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        offsets = [end, end := end + tensor.num_bytes]
        header[tensor.name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    with naming(path), open(path, "xb") as file:  # x: fails if the file exists
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            _write_tensor(file, tensor, progress)
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(file: BinaryIO, stored: Stored, progress: Progress) -> None:
    tensor = torch.atleast_1d(stored.read())  # a 0-dim tensor cannot be split
    rows = max(1, BLOCK_BYTES // max(1, tensor[:1].numel() * tensor.element_size()))
    for block in tensor.split(rows):
        converted = block.to(stored.dtype)
        if (converted.isinf() & block.isfinite()).any():
            raise ConfigError(f"{stored.name} has values that overflow {stored.dtype}; use another dtype")
        data = converted.contiguous().reshape(-1).view(torch.uint8)  # NumPy has no bf16
        file.write(data.numpy())  # type: ignore[arg-type]
        progress.add(len(data))


def open_weights(folder: Path, canonical: Callable[[str], str | None]) -> dict[str, Stored]:
    """Return the tensors of a folder by canonical name, without those for which `canonical` returns None.

    Raises ConfigError, naming the file, if it is missing or damaged, or if two tensors have the same canonical name.
    """
    readers = {SINGLE: _of_file, INDEX: _of_index, PICKLE: _of_pickle}
    for name, reader in readers.items():
        if (folder / name).is_file():
            stored = reader(folder / name)
            break
    else:
        raise ConfigError(f"{folder} holds no {SINGLE}, {INDEX} or {PICKLE}; give a folder that save_pretrained wrote")
    weights: dict[str, Stored] = {}
    for name, tensor in stored.items():
        if (short := canonical(name)) is None:
            continue
        if short in weights:
            raise ConfigError(f"{folder}: {name} is also stored as {weights[short].name}; remove one of them")
        weights[short] = tensor
    return weights


def _of_file(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file. They stay on disk until they are read."""
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size - 8 - length
            if size < 0 or length > MOST_HEADER_BYTES:
                raise ValueError("it ends within its header")
            header = documents.parse_json(file.read(length), dict[str, Any])
        header.pop("__metadata__", None)
        entries = {name: documents.checked(entry, _Entry, name) for name, entry in header.items()}
        _refuse_other_than_adjacent(entries)
        tensors = {name: _entry(path, name, entry, 8 + length, size) for name, entry in entries.items()}
    except OSError as error:
        raise ConfigError(f"cannot read {system_error(error)}") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path} is not a safetensors file, or is damaged: {error}; download it again") from None
    if sum(each.num_bytes for each in tensors.values()) != size:
        raise ConfigError(f"{path} has {size} bytes of data, which does not match its header; download it again")
    return tensors


def _refuse_other_than_adjacent(entries: dict[str, _Entry]) -> None:
    """Raise ValueError if the data of two tensors overlap or have a hole between them, as bytes would be read twice or
    hidden."""
    places = sorted((*entry["data_offsets"], name) for name, entry in entries.items())
    for (_, end, name), (begin, stop, other) in pairwise(places):
        if begin < end:
            raise ValueError(f"the data of {name} and of {other} overlap by {min(end, stop) - begin} bytes")
    for (_, end, name), (begin, _, other) in pairwise([(0, 0, "the header"), *places]):
        if begin > end:
            raise ValueError(f"{begin - end} bytes between {name} and {other} are of no tensor")


def _entry(path: Path, name: str, entry: _Entry, data: int, size: int) -> Stored:
    """Return a tensor from its header entry. Raises ValueError for an invalid entry."""
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {entry['dtype']}")
    dtype = DTYPES[entry["dtype"]]

    def read() -> Tensor:
        content = bytearray(end - begin)  # writable, or torch.frombuffer warns
        with open_regular(path) as file, naming(path):
            file.seek(data + begin)
            if file.readinto(content) != len(content):
                raise ConfigError(f"{path} ends within {name}; download it again")
        # frombuffer refuses an empty buffer.
        return torch.frombuffer(content, dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)

    stored = Stored(name, shape, dtype, read)
    if end - begin != stored.num_bytes or end > size:
        raise ValueError(f"the shape or the offsets of {name} are invalid")
    return stored


def _of_index(path: Path) -> dict[str, Stored]:
    where = read_object(path).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise ConfigError(f"{path} has no weight_map from names to files; download it again")
    files: dict[str, dict[str, Stored]] = {}
    for file in sorted(set(where.values())):
        if not file or Path(file).name != file:  # reject files outside the folder
            raise ConfigError(f"{path}: {file} is not a file name in the same folder; download it again")
        files[file] = _of_file(path.with_name(file))
    for name, file in where.items():
        if name not in files[file]:
            raise ConfigError(f"{path}: {name} is not in {file}; download both again")
    return {name: files[file][name] for name, file in where.items()}


def _of_pickle(path: Path) -> dict[str, Stored]:
    state = load_pickle(path)
    return {name: Stored(name, tuple(v.shape), v.dtype, partial(state.__getitem__, name)) for name, v in state.items()}


def load_pickle(path: Path, *, mapped: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a pickled state dict. With `mapped`, they are memory-mapped and read when used.

    Unpickling runs no code from the file. Raises ConfigError, naming the file, if it is not a state dict of tensors.
    """
    refuse_special(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a hostile pickle can raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        # torch's message explains how to unpickle it anyway, which would run its code.
        if isinstance(error, pickle.UnpicklingError):
            reason = "it holds other objects, which are not unpickled; save its state dict with save_pretrained"
        raise ConfigError(f"{path} cannot be read as a state dict of tensors: {reason}") from None
    plain = isinstance(content, dict) and all(isinstance(each, Tensor) for each in content.values())
    if not plain or any(each.layout is not torch.strided for each in content.values()):
        raise ConfigError(f"{path} is not a state dict of tensors")
    return content


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises ConfigError, naming the file, if it cannot be read or is not an object.
    """
    try:
        return documents.read_json(path, dict[str, Any])
    except OSError as error:
        raise ConfigError(f"cannot read {system_error(error)}") from None
    except documents.DocumentError as error:
        raise ConfigError(f"{path} cannot be used: {error}") from None
