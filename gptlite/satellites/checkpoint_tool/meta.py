"""Folders of weights as Meta distributes them: params.json, consolidated.00.pth and further shards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gptlite.checkpoint.huggingface import Stored, load_pickle, read_object
from gptlite.errors import ConfigError
from gptlite.satellites.huggingface.adapter import Adapter
from gptlite.satellites.huggingface.adapters import all_adapters

PARAMS = "params.json"
SHARD = re.compile(r"consolidated\.(\d+)\.pth")


def is_meta(source: Path) -> bool:
    """Return True for a folder with Meta's files and no config.json."""
    return (source / PARAMS).is_file() and not (source / "config.json").is_file()


def open_meta(source: Path) -> tuple[dict[str, Any], Adapter, dict[str, Stored]]:
    """Return the content of an equivalent config.json, the model's adapter, and the tensors by canonical name.

    Shards are memory-mapped, and read one tensor at a time. Raises ConfigError if shards are missing, or if no adapter
    supports the model.
    """
    params, shard_paths = read_object(source / PARAMS), {}
    for path in source.iterdir():
        if match := SHARD.fullmatch(path.name):
            shard_paths[int(match[1])] = path
    if not shard_paths or sorted(shard_paths) != list(range(len(shard_paths))):
        words = ", ".join(path.name for _, path in sorted(shard_paths.items())) or "no consolidated.00.pth"
        raise ConfigError(f"source={source} holds {words}; give all shards, numbered from 00 without gaps")
    shards = [load_pickle(path, mapped=True) for _, path in sorted(shard_paths.items())]
    for adapter in all_adapters():
        try:
            read = adapter.from_meta(params, shards)
        except ConfigError as error:
            raise ConfigError(f"source={source}: {error}") from None
        if read is not None:
            content, pieces = read
            tensors = {each.name: Stored(each.name, each.shape, each.dtype, each.read) for each in pieces}
            return content, adapter, {adapter.canonical(name) or name: each for name, each in tensors.items()}
    raise ConfigError(
        f"source={source}: no registered model reads these files of Meta's; register one with plugins=[MODULE]"
    )
