"""The seam to torch.distributed.checkpoint (DCP): what its defaults leave open is closed here.

Seen in torch 2.13: it wraps every error, Ctrl-C too, into a BaseException; it unpickles `.metadata` without limits;
it loads a gap in a tensor's chunks without a word; it syncs `.metadata` before its buffer is flushed (the manifest
syncs all files again, so DCP's own sync is off).
"""

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from gptlite.progress import Log, Progress

_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


def write(folder: Path, tensors: dict[str, Tensor], log: Log) -> None:
    """Writes tensors, each under its global key, into a new `folder`. Raises TypeError for anything but a tensor."""
    for key, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"checkpoint key {key} is a {type(value).__name__}: tensors only, the rest goes into meta")
    # One thread: an error in a second one is lost, and the checkpoint is committed without its tensors.
    writer = _Writer(folder, thread_count=1, sync_files=False, overwrite=False)
    planner = _SavePlanner(_progress("checkpoint: saving", tensors, log))
    with _plain_errors():
        metadata = save(tensors, storage_writer=writer, planner=planner, no_dist=True)
    _check_coverage(metadata, tensors)


def read(folder: Path, into: dict[str, Tensor], log: Log) -> None:
    """Reads into the given tensors in place. Keys, shapes and dtypes must have been compared before.

    Raises pickle.UnpicklingError if `.metadata` holds anything but DCP's own classes, ValueError for missing pieces.
    """
    with open(folder / ".metadata", "rb") as file:
        metadata = _Unpickler(file).load()
    _check_coverage(metadata, into)
    planner = _LoadPlanner(_progress("checkpoint: loading", into, log))
    with _plain_errors():
        load(into, storage_reader=_Reader(folder, metadata), planner=planner, no_dist=True)


def _progress(label: str, tensors: dict[str, Tensor], log: Log) -> Progress:
    return Progress(label, sum(tensor.nbytes for tensor in tensors.values()), log)


def _check_coverage(metadata: Metadata, tensors: dict[str, Tensor]) -> None:
    """Every element of every tensor lies in a stored chunk. (That chunks don't overlap, DCP checks when it saves.)"""
    for key, tensor in tensors.items():
        entry = metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata) or entry.size != tensor.shape:
            raise ValueError(f"checkpoint key {key} is not stored with shape {list(tensor.shape)}")
        stored = sum(prod(chunk.sizes) for chunk in entry.chunks)
        if stored != prod(entry.size):
            raise ValueError(f"checkpoint key {key} is stored in part: {stored} of {prod(entry.size)} elements")


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta | None:
        # DCP would pickle the staging path: stale after the rename, and a pathlib class is no portable format.
        return None


class _Reader(FileSystemReader):
    def __init__(self, path: Path, metadata: Metadata):
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, progress: Progress):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._progress = progress

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        if isinstance(data, Tensor):
            self._progress.add(data.nbytes)
        return data


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, progress: Progress):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._progress = progress

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        self._progress.add(tensor.nbytes)


class _Unpickler(pickle.Unpickler):
    """Knows the classes of DCP's metadata and no others, so that a foreign checkpoint cannot run code here."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype))
        if not allowed:
            raise pickle.UnpicklingError(f"data/.metadata asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Lets the original exception out: a full disk stays an OSError, Ctrl-C a KeyboardInterrupt."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            yield
        except CheckpointException as error:
            original, _ = next(iter(error.failures.values()))
            raise original from None
