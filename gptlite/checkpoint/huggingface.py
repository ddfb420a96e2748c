"""The weights in a Hugging Face folder: one safetensors file, several with an index, or an older pickle."""

import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptlite.checkpoint.safetensors import SafetensorsFile, Slot, write
from gptlite.errors import ConfigError
from gptlite.files import write_synced
from gptlite.progress import Log, Progress

SINGLE, INDEX, PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


@dataclass(frozen=True)
class Stored:
    """A tensor that lies in a folder: its full name there, and how to read it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def write_weights(
    folder: Path, slots: Sequence[Slot], read: Callable[[Slot], Tensor], max_shard_bytes: int, log: Log
) -> None:
    """Writes tensors into one file, or into several with an index where they are more than `max_shard_bytes`.

    Raises what `safetensors.write` does.
    """
    progress = Progress("export", sum(slot.num_bytes for slot in slots), log)
    shards = list(_shards(slots, max_shard_bytes))
    if len(shards) == 1:
        write(folder / SINGLE, slots, read, progress)
        return
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write(folder / name, shard, read, progress)
        where |= {slot.name: name for slot in shard}
    index = {"metadata": {"total_size": sum(slot.num_bytes for slot in slots)}, "weight_map": where}
    write_synced(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _shards(slots: Sequence[Slot], limit: int) -> Iterator[list[Slot]]:
    """In order, each as full as may be; a larger tensor has one to itself."""
    shard: list[Slot] = []
    size = 0
    for slot in slots:
        if shard and size + slot.num_bytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(slot)
        size += slot.num_bytes
    yield shard


def open_weights(folder: Path, canonical: Callable[[str], str | None]) -> dict[str, Stored]:
    """What is stored in a folder, by canonical name; what has none is left out.

    Raises ConfigError, naming the file, for one that is missing or damaged, or for a name that is there twice.
    """
    if (folder / SINGLE).is_file():
        stored = _of_file(folder / SINGLE)
    elif (folder / INDEX).is_file():
        stored = _of_index(folder)
    elif (folder / PICKLE).is_file():
        stored = _of_pickle(folder / PICKLE)
    else:
        raise ConfigError(f"{folder} holds no {SINGLE}, {INDEX} or {PICKLE}; give a folder that save_pretrained wrote")
    weights: dict[str, Stored] = {}
    for name, each in stored.items():
        if (short := canonical(name)) is None:
            continue
        if short in weights:
            raise ConfigError(f"{folder}: {name} is stored twice, as {weights[short].name} too; take one out")
        weights[short] = each
    return weights


def _of_file(path: Path) -> dict[str, Stored]:
    file = SafetensorsFile(path)
    return {name: Stored(name, slot.shape, slot.dtype, partial(file.read, name)) for name, slot in file.slots.items()}


def _of_index(folder: Path) -> dict[str, Stored]:
    path = folder / INDEX
    content = read_json(path)
    where = content.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise ConfigError(f"{path} has no weight_map from names to files; fetch it again")
    files: dict[str, dict[str, Stored]] = {}
    for file in sorted(set(where.values())):
        if Path(file).name != file:  # no file outside of the folder
            raise ConfigError(f"{path}: {file} is no name of a file beside it; fetch it again")
        files[file] = _of_file(folder / file)
    for name, file in where.items():
        if name not in files[file]:
            raise ConfigError(f"{path}: {name} is not in {file}; fetch both again")
    return {name: files[file][name] for name, file in where.items()}


def _of_pickle(path: Path) -> dict[str, Stored]:
    """Of a state dict, all of it in memory, whose unpickling runs no code."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle of anything raises anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        # torch's own words are how to unpickle it after all, which would run what is in it.
        if isinstance(error, pickle.UnpicklingError):
            reason = "it holds something else, which is not unpickled; save its state dict with save_pretrained"
        raise ConfigError(f"{path} cannot be read as a state dict of tensors: {reason}") from None
    if not isinstance(content, dict) or not all(_is_plain(value) for value in content.values()):
        raise ConfigError(f"{path} is not a state dict of tensors")
    state: dict[str, Tensor] = content
    return {name: Stored(name, tuple(v.shape), v.dtype, partial(state.__getitem__, name)) for name, v in state.items()}


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file. Raises ConfigError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content
