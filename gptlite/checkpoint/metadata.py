"""Restricted unpickling and checks of data/.metadata, which has the location of all tensor elements.

torch.distributed.checkpoint (DCP), as of torch 2.13, unpickles it without restrictions, and silently loads tensors
whose chunks leave gaps.
"""

import pickle
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from gptlite.checkpoint.manifest import DamagedCheckpoint, Entries, Manifest, in_words, read_file, spell
from gptlite.torch_private import saved
from gptlite.unpickle import unpickle

NAME = "data/.metadata"


def read_metadata(folder: Path, manifest: Manifest) -> Metadata:
    """Return the metadata of a step folder. Raises DamagedCheckpoint, in one line, unless it is a pickle that contains
    only DCP's classes, and locates each element of each tensor in exactly one box of a file."""
    content = read_file(folder, NAME)
    try:
        metadata = unpickle(content, _NAMES, _SETTERS)
    except pickle.UnpicklingError as error:
        raise DamagedCheckpoint(folder, f"{NAME}: {' '.join(str(error).split())}"[:300]) from None
    try:
        check_metadata(metadata, manifest.tensors, manifest.files)
    except ValueError as error:
        raise DamagedCheckpoint(folder, str(error)) from None
    except Exception:
        raise DamagedCheckpoint(folder, f"{NAME} is not metadata of torch.distributed.checkpoint") from None
    return metadata


def boxes_of(metadata: Metadata, key: str) -> list[tuple[ChunkStorageMetadata, saved.StorageInfo]]:
    """Return the boxes of a tensor (DCP calls them chunks), each with its location in a file."""
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return [(box, metadata.storage_data[MetadataIndex(key, box.offsets)]) for box in entry.chunks]


def check_metadata(metadata: Metadata, tensors: Entries, files: Entries) -> None:
    """Raise ValueError unless exactly `tensors` are stored, each element in exactly one box, each box in one of
    `files`.

    `tensors` and `files` are entries of a manifest.
    """
    entries = metadata.state_dict_metadata
    if extra := entries.keys() - tensors.keys():
        raise ValueError(f"checkpoint key {min(extra)!r:.100} is not in the manifest")
    for key, wanted in tensors.items():
        entry = entries.get(key)
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
    key: str, box: ChunkStorageMetadata, whole: torch.Size, place: saved.StorageInfo | None, files: Entries
) -> None:
    offset, sizes = list(box.offsets), list(box.sizes)
    if not len(offset) == len(sizes) == len(whole) or not saved.is_inside(whole, box):
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
            if saved.boxes_overlap(one, other):
                places = f"{list(one.offsets)} and {list(other.offsets)}"
                raise ValueError(f"checkpoint key {key}: the boxes at {places} overlap")


def _size(values: Any) -> torch.Size:
    if type(values) is not tuple or not all(type(each) is int and each >= 0 for each in values):
        raise pickle.UnpicklingError("a size is not a tuple of whole numbers")
    return torch.Size(values)


def _memory_format(number: int) -> saved.MemoryFormat:
    return saved.MemoryFormat(number)


def _member(kind: Any, name: str) -> saved.MemoryFormat:
    """Return a memory format by its name: Python 3.11.0 to 3.11.3 pickles a member of an Enum as an attribute."""
    if kind is not _memory_format:
        raise pickle.UnpicklingError(f"it refers to {name!r:.100} of {kind!r:.100}")
    return saved.MemoryFormat[name]


def _setter(**kinds: type | tuple[type, ...]) -> Callable[[Any, Any], None]:
    """Return a function that sets fields of an instance, if they have these types."""

    def set_fields(instance: Any, state: Any) -> None:
        if type(state) is not dict or not all(isinstance(value, kinds.get(key, ())) for key, value in state.items()):
            raise pickle.UnpicklingError(f"a {type(instance).__name__} has a field that it cannot have")
        vars(instance).update(state)

    return set_fields


def _set_properties(instance: TensorProperties, state: Any) -> None:
    kinds = [torch.dtype, torch.layout, bool, saved.MemoryFormat, bool]
    if type(state) is not tuple or [type(each) for each in state[:5]] != kinds or not _are_strides(state[5:]):
        raise pickle.UnpicklingError("properties of a tensor have a field that they cannot have")
    instance.__setstate__(state[:5])  # without strides, which older versions of torch do not expect


def _are_strides(fields: tuple[Any, ...]) -> bool:
    """Return True if these are the fields that torch 2.15 added: strides, or None."""
    return fields in ((), (None,)) or (
        len(fields) == 1 and type(fields[0]) is tuple and all(type(each) is int for each in fields[0])
    )


_NONE = type(None)
_NAMES = {
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch", "Size"): _size,
    saved.LAYOUT_NAMED: saved.layout_named,
    saved.MEMORY_FORMAT: _memory_format,
    ("builtins", "getattr"): _member,
    saved.STORAGE_INFO: saved.StorageInfo,
    **{
        ("torch.distributed.checkpoint.metadata", each.__name__): each
        for each in (
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            StorageMeta,
            TensorProperties,
            TensorStorageMetadata,
        )
    },
}
_SETTERS: dict[type, Callable[[Any, Any], None]] = {
    ChunkStorageMetadata: _setter(offsets=torch.Size, sizes=torch.Size),
    Metadata: _setter(
        state_dict_metadata=dict,
        planner_data=object,
        storage_data=(dict, _NONE),
        storage_meta=(StorageMeta, _NONE),
        version=(str, _NONE),
    ),
    MetadataIndex: _setter(fqn=str, offset=(torch.Size, _NONE), index=(int, _NONE)),
    StorageMeta: _setter(
        checkpoint_id=(str, _NONE), save_id=(str, _NONE), load_id=(str, _NONE), modules=list, version=(str, _NONE)
    ),
    TensorProperties: _set_properties,
    TensorStorageMetadata: _setter(properties=TensorProperties, size=torch.Size, chunks=list),
    saved.StorageInfo: _setter(relative_path=str, offset=int, length=int, transform_descriptors=(list, tuple, _NONE)),
}
