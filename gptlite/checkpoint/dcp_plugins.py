"""What DCP calls back: planners that speak of boxes, files that are hashed, and pickles that cannot run code."""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from gptlite.checkpoint.hashed_file import HashedFile
from gptlite.checkpoint.manifest import Entries
from gptlite.checkpoint.parts import Parts, check_coverage
from gptlite.progress import Log

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


class Files(FileSystem):
    """Files of tensors are hashed on their way to the disk, and their entries kept."""

    def __init__(self) -> None:
        self.entries: Entries = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        path = Path(path)
        if mode != "wb" or path.suffix != ".distcp":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with HashedFile(path, partial(self.entries.__setitem__, path.name)) as file:
            try:
                yield file
            except Exception as error:
                raise file.error or error from None


class Writer(FileSystemWriter):
    """Hashes what this rank writes, and keeps what goes wrong for `outcome`."""

    def __init__(self, folder: Path):
        # One thread: an error in a second one is lost, and the checkpoint is committed without its tensors.
        super().__init__(folder, thread_count=1, sync_files=False, overwrite=False)
        self.fs = self._files = Files()
        self._error: BaseException | None = None

    def outcome(self, metadata: Metadata, parts: Parts) -> Entries:
        """The manifest's entries of the files written here. Raises what went wrong, here or with these parts."""
        if self._error is not None:
            raise self._error
        check_coverage(metadata, parts.described)
        return self._files.entries

    def storage_meta(self) -> StorageMeta | None:
        # DCP would pickle the staging path: stale after the rename, and a pathlib class is no portable format.
        return None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # the folder is there, and new

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        try:
            if plan.items:
                results = super().write_data(plan, planner).value()
        except BaseException as error:
            self._error = error
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            super().finish(metadata, results)
        except BaseException as error:
            self._error = self._error or error


class Reader(FileSystemReader):
    """Takes the metadata that has been read with care, and reads each stored box once, one at a time.

    DCP's own loop reads a box for each wanted piece of it, and holds two.
    """

    def __init__(self, path: Path, metadata: Metadata):
        super().__init__(path)
        self._metadata = metadata
        entries = metadata.state_dict_metadata.items()
        self._sizes = {
            MetadataIndex(key, chunk.offsets): chunk.sizes
            for key, entry in entries
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(item.storage_index, []).append(item)
        places = {index: self.storage_data[index] for index in wanted}
        for index in sorted(wanted, key=lambda index: (places[index].relative_path, places[index].offset)):
            with self.fs.create_stream(Path(self.path) / places[index].relative_path, "rb") as file:
                stored = torch.load(self._slice_file(file, places[index]), map_location="cpu", weights_only=True)
            if not isinstance(stored, Tensor) or stored.shape != self._sizes[index]:
                raise ValueError(f"{index.fqn} is not stored as its metadata says")
            for item in wanted[index]:
                target = planner.resolve_tensor(item).detach()
                if stored.dtype != target.dtype:  # copy_ would cast without a word
                    raise ValueError(f"{item.storage_index.fqn} is stored as {stored.dtype}")
                target.copy_(_box(stored, item))
                planner.commit_tensor(item, target)
            del stored  # before the next one is read
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _box(stored: Tensor, item: ReadItem) -> Tensor:
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        stored = stored.narrow(dim, start, length)
    return stored


class BoxSavePlanner(DefaultSavePlanner):
    """Offers the boxes that are this rank's to write."""

    def __init__(self, parts: Parts, log: Log):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts, self._progress = parts, parts.progress("saving", log, parts.written)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(key, self._parts.chunks[key]) for key in self._parts.written])
        return self.plan

    def _item(self, key: str, chunk: ChunkStorageMetadata) -> WriteItem:
        properties = TensorProperties(dtype=self._parts.local[key].dtype)
        data = TensorWriteData(chunk, properties, torch.Size(self._parts.described[key]["shape"]))
        return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._parts.local[index.fqn]

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        if isinstance(data, Tensor):
            self._progress.add(data.nbytes)
        return data


class BoxLoadPlanner(DefaultLoadPlanner):
    """Asks for this rank's boxes, from whichever stored ones hold them."""

    def __init__(self, parts: Parts, log: Log):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts, self._progress = parts, parts.progress("loading", log, parts.chunks)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, chunk in self._parts.chunks.items():
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(key, stored, [chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._parts.local[index.fqn]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        self._progress.add(tensor.nbytes)


class MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of DCP's metadata and no others, so that a foreign checkpoint cannot run code here."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # Python 3.11.0 to 3.11.3 pickles a member of an Enum as an attribute of its class
        allowed = (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype))
        if not allowed:
            raise pickle.UnpicklingError(f"data/.metadata asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Enum:
    """A member of an Enum by its name. Raises pickle.UnpicklingError for an attribute of anything else."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"data/.metadata asks for {name} of {kind}, which no checkpoint needs")
    return kind[name]
