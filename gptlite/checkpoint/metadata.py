"""Restricted unpickling and checks of data/.metadata, which has the location of all tensor elements.

torch.distributed.checkpoint (DCP), as of torch 2.13, unpickles it without restrictions, and silently loads tensors
whose chunks leave gaps.
"""

import io
import pickle
from collections.abc import Sequence
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import _check_box_bounds, _check_box_overlap
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from gptlite.checkpoint.manifest import DamagedCheckpoint, Entries, Manifest, in_words, read_file, spell

NAME = "data/.metadata"
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
}


def read_metadata(folder: Path, manifest: Manifest) -> Metadata:
    """Return the metadata of a step folder. Raises DamagedCheckpoint, in one line, unless it is a pickle that contains
    only DCP's classes, and locates each element of each tensor in exactly one box of a file."""
    content = read_file(folder, NAME)
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # a hostile pickle can raise anything
        words = " ".join(str(error).split())
        raise DamagedCheckpoint(folder, f"{NAME}: {type(error).__name__}: {words}"[:300]) from None
    try:
        check_metadata(metadata, manifest.tensors, manifest.files)
    except ValueError as error:
        raise DamagedCheckpoint(folder, str(error)) from None
    except Exception:
        raise DamagedCheckpoint(folder, f"{NAME} is not metadata of torch.distributed.checkpoint") from None
    return metadata


def boxes_of(metadata: Metadata, key: str) -> list[tuple[ChunkStorageMetadata, _StorageInfo]]:
    """Return the boxes of a tensor (DCP calls them chunks), each with its location in a file."""
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return [(box, metadata.storage_data[MetadataIndex(key, box.offsets)]) for box in entry.chunks]


def check_metadata(metadata: Metadata, tensors: Entries, files: Entries) -> None:
    """Raise ValueError unless exactly `tensors` are stored, each element in exactly one box, each box in one of
    `files`.

    `tensors` and `files` are entries of a manifest.
    """
    found = metadata.state_dict_metadata
    if extra := found.keys() - tensors.keys():
        raise ValueError(f"checkpoint key {min(extra)!r:.100} is not in the manifest")
    for key, wanted in tensors.items():
        entry = found.get(key)
        if not isinstance(entry, TensorStorageMetadata) or spell(entry.size, entry.properties.dtype) != wanted:
            raise ValueError(f"checkpoint key {key} is not stored as {in_words(wanted)}")
        stored = sum(prod(box.sizes) for box in entry.chunks)
        # Boxes lie inside the tensor and do not overlap (checked below), so if the sizes agree, no element is missing.
        if stored != prod(entry.size):
            raise ValueError(f"checkpoint key {key}: its boxes hold {stored} of {prod(entry.size)} elements")
        for box in entry.chunks:
            _check_box(key, box, entry.size, metadata.storage_data.get(MetadataIndex(key, box.offsets)), files)
        _refuse_overlap(key, [box for box in entry.chunks if prod(box.sizes)])


def _check_box(
    key: str, box: ChunkStorageMetadata, whole: torch.Size, place: _StorageInfo | None, files: Entries
) -> None:
    offset, sizes = list(box.offsets), list(box.sizes)
    if not len(offset) == len(sizes) == len(whole) or not _check_box_bounds(whole, box):
        raise ValueError(f"checkpoint key {key}: a box of {sizes} at {offset} exceeds the shape {list(whole)}")
    if place is None:
        raise ValueError(f"checkpoint key {key}: the box at {offset} is in no file")
    if place.transform_descriptors:
        raise ValueError(f"{NAME} marks tensors as compressed or otherwise transformed")
    file = files.get(f"data/{place.relative_path}")
    if file is None or not 0 <= place.offset <= place.offset + place.length <= file["bytes"]:
        name = f"data/{place.relative_path}"
        raise ValueError(f"checkpoint key {key}: {name!r:.100} does not contain its box at {offset}")


def _refuse_overlap(key: str, boxes: Sequence[ChunkStorageMetadata]) -> None:
    if len(boxes) < 2:
        return
    # Sorted along the dim with the most different offsets, so that a box is compared with few others.
    axis = max(range(len(boxes[0].sizes)), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    boxes = sorted(boxes, key=lambda box: box.offsets[axis])
    for number, one in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if other.offsets[axis] >= one.offsets[axis] + one.sizes[axis]:
                break
            if _check_box_overlap(one, other):
                places = f"{list(one.offsets)} and {list(other.offsets)}"
                raise ValueError(f"checkpoint key {key}: the boxes at {places} overlap")


class _Unpickler(pickle.Unpickler):
    """Unpickler limited to the classes of DCP's metadata, so that an untrusted checkpoint cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # Python 3.11.0 to 3.11.3 pickles a member of an Enum as an attribute of its class
        allowed = (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype))
        if not allowed:
            raise pickle.UnpicklingError(f"{NAME} refers to {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Enum:
    """Return a member of an Enum by its name. Raises pickle.UnpicklingError for an attribute of anything else."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"{NAME} refers to {name} of {kind}, which no checkpoint needs")
    return kind[name]
