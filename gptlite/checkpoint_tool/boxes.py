"""Where the elements of tensors lie: data/.metadata, read with care. torch comes with it."""

import io
import pickle
from dataclasses import dataclass
from itertools import combinations
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from gptlite.checkpoint.dcp_plugins import MetadataUnpickler
from gptlite.checkpoint.load import load_tensors
from gptlite.checkpoint.manifest import DamagedCheckpoint, Entries, Manifest, read_file
from gptlite.checkpoint.parts import check_coverage, described
from gptlite.progress import log


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor and the bytes of a file in data/ that hold it."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    position: int
    length: int


def read_boxes(folder: Path, manifest: Manifest) -> dict[str, list[StoredBox]]:
    """The boxes of every tensor. Raises DamagedCheckpoint unless each element lies in exactly one, within its file."""
    try:
        metadata = MetadataUnpickler(io.BytesIO(read_file(folder, "data/.metadata"))).load()
        check_coverage(metadata, manifest.tensors)
        if extra := described(metadata).keys() - manifest.tensors.keys():
            raise ValueError(f"checkpoint key {min(extra)} is not in the manifest")
        boxes = {key: _boxes(metadata, key) for key in manifest.tensors}
        for key, each in boxes.items():
            _check(key, each, manifest)
    except (pickle.UnpicklingError, ValueError) as error:
        raise DamagedCheckpoint(folder, str(error)) from None
    return boxes


def _boxes(metadata: Metadata, key: str) -> list[StoredBox]:
    entry, storage = metadata.state_dict_metadata[key], metadata.storage_data
    assert isinstance(entry, TensorStorageMetadata)
    stored = {index.offset: info for index, info in storage.items() if index.fqn == key} if storage else {}
    found = []
    for chunk in entry.chunks:
        if chunk.offsets not in stored:
            raise ValueError(f"checkpoint key {key}: the box at {list(chunk.offsets)} is in no file")
        info = stored[chunk.offsets]
        found.append(StoredBox(tuple(chunk.offsets), tuple(chunk.sizes), info.relative_path, info.offset, info.length))
    return found


def _check(key: str, boxes: list[StoredBox], manifest: Manifest) -> None:
    whole = manifest.tensors[key]["shape"]
    for box in boxes:
        ends = [start + size for start, size in zip(box.offset, box.sizes, strict=True)]
        if len(ends) != len(whole) or any(end > size for end, size in zip(ends, whole, strict=True)):
            raise ValueError(
                f"checkpoint key {key}: a box of {list(box.sizes)} at {list(box.offset)} is outside {whole}"
            )
        file = manifest.files.get(f"data/{box.file}")
        if file is None or box.position + box.length > file["bytes"]:
            raise ValueError(f"checkpoint key {key}: data/{box.file} does not hold its box at {list(box.offset)}")
    for one, other in combinations([box for box in boxes if prod(box.sizes)], 2):
        sides = zip(one.offset, one.sizes, other.offset, other.sizes, strict=True)
        if all(max(a, b) < min(a + m, b + n) for a, m, b, n in sides):
            raise ValueError(f"checkpoint key {key}: the boxes at {list(one.offset)} and {list(other.offset)} overlap")


def read_whole(folder: Path, entries: Entries) -> dict[str, Tensor]:
    """Whole tensors, by the shapes and dtypes of a manifest. Their files are checked by size alone."""
    tensors = {key: torch.empty(each["shape"], dtype=getattr(torch, each["dtype"])) for key, each in entries.items()}
    load_tensors(folder, tensors, strict=False, verified=True, log=log)
    return tensors
