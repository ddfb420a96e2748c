"""Adapter for torch.distributed.checkpoint (DCP). Together with the module `metadata`, it works around gaps in DCP.

Observed in torch 2.13: DCP wraps every error, including KeyboardInterrupt, in CheckpointException. It calls fsync on
`.metadata` before the file's buffer is flushed; since the manifest syncs all files again, DCP's sync is off. It pickles
errors to send them between ranks, and if an error cannot be pickled, all ranks hang. Write errors are therefore hidden
from DCP and raised afterwards.

DCP receives plain local tensors and their boxes (offsets and sizes in the global tensor). `.metadata` then contains
keys, global shapes and boxes, and is independent of ranks, meshes and DTensors. If several ranks hold a box, one of
them writes it.
"""

import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from gptlite.checkpoint.hashed_file import HashedFile
from gptlite.checkpoint.manifest import DamagedCheckpoint, Entries
from gptlite.checkpoint.metadata import check_metadata
from gptlite.checkpoint.parts import Parts
from gptlite.files import open_regular
from gptlite.parallelism.in_files import changed, read_once
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import from_all
from gptlite.progress import Log
from gptlite.torch_private.saved import slice_of

# Emitted at every save and load by a single process. Filtered globally, as warnings.catch_warnings is not thread-safe.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def write(
    folder: Path,
    parts: Parts,
    log: Log,
    mesh: Mesh,
    group: dist.ProcessGroup | None,
    agree: dist.ProcessGroup | None = None,
) -> Entries:
    """Write tensors, each under its global key, into the new folder `data` of a step folder. Each box is written once.

    Returns, on every rank, the manifest entries of the files of all ranks. All ranks call this. DCP communicates over
    `group` (None for one rank); errors are exchanged by `rank_sync.from_all` over `agree`. An exception on one rank is
    raised on all: OSError, e.g. for a full disk; ValueError if an element is in no box, or in several.
    """
    writer, planner = _Writer(folder / "data"), _SavePlanner(parts, log)
    with _plain_errors():
        metadata = save(parts.local, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    files = {name: entry for each in from_all(mesh, writer.outcome, agree) for name, entry in each.items()}
    check_metadata(metadata, parts.described, files)
    return files


def read(folder: Path, metadata: Metadata, parts: Parts, log: Log) -> None:
    """Read this rank's parts in place from a step folder. Keys, shapes and dtypes must have been checked.

    Raises DamagedCheckpoint, in one line, if stored data is not the expected tensor.
    """
    reader, planner = _Reader(folder / "data", metadata), _LoadPlanner(parts, log)
    try:
        with _plain_errors():
            # no_dist: ranks read their boxes independently, so that a rank that fails leaves no other rank waiting.
            load(parts.local, storage_reader=reader, planner=planner, no_dist=True)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except pickle.UnpicklingError as error:  # torch's message, which explains unsafe loading, is replaced
        raise DamagedCheckpoint(folder, "a stored object is not a tensor") from error
    except Exception as error:
        words = (str(error).splitlines() or [""])[0]
        reason = f"a tensor cannot be read: {type(error).__name__}: {words:.150}"
        raise DamagedCheckpoint(folder, reason) from error


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the exception that DCP has wrapped, e.g. OSError for a full disk, or KeyboardInterrupt."""
    try:
        yield
    except CheckpointException as error:
        original, _ = next(iter(error.failures.values()))
        raise original from None


class _Files(FileSystem):
    """File system that hashes tensor files while they are written, and collects their manifest entries."""

    def __init__(self) -> None:
        self.entries: Entries = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        path = Path(path)
        if mode != "wb" or path.suffix != ".distcp":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with HashedFile(path) as file:
            try:
                yield file
            except Exception as error:
                raise file.error or error from None  # the OSError that caused the error of torch's zip writer
        self.entries[f"data/{path.name}"] = file.entry


class _Writer(FileSystemWriter):
    """Storage writer that hashes this rank's files, and stores an error for `outcome` to raise."""

    def __init__(self, folder: Path):
        # One thread: DCP ignores an error in a second thread, and would commit the checkpoint without its tensors.
        super().__init__(folder, thread_count=1, sync_files=False, overwrite=False)
        self.fs = self._files = _Files()
        self._error: BaseException | None = None

    def outcome(self) -> Entries:
        """Return the manifest entries of the files written here. Raises the error of the write, if any."""
        if self._error is not None:
            raise self._error
        return self._files.entries

    def storage_meta(self) -> StorageMeta | None:
        # DCP would pickle the staging path, which is stale after the rename, and a pathlib class is not portable.
        return None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # DCP would create the folder here, but it already exists

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        try:
            if plan.items:
                results = super().write_data(plan, planner).value()
        except BaseException as error:
            self._error = error
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            super().finish(metadata, results)
        except BaseException as error:
            self._error = self._error or error  # the first error is the cause
        # torch 2.11 completes a copy, but `save` returns this object.
        metadata.storage_data = {each.index: each.storage_data for written in results for each in written}


class _Reader(FileSystemReader):
    """Storage reader that uses the checked metadata and verifies that each stored box matches it.

    One box is in memory at a time; in DCP's own loop, two boxes are.
    """

    def __init__(self, path: Path, metadata: Metadata):
        super().__init__(path)
        self._metadata: Any = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        places = self._metadata.storage_data
        items = [(places[item.storage_index], item) for item in plan.items]
        # In file order, so that the operating system can read ahead.
        for place, item in sorted(items, key=lambda each: (each[0].relative_path, each[0].offset)):
            self._read_box(place, item, planner)
        return _done(None)

    def _read_box(self, place: Any, item: ReadItem, planner: LoadPlanner) -> None:
        with open_regular(Path(self.path) / place.relative_path) as file:
            # weights_only: an untrusted checkpoint must not run code.
            stored = torch.load(slice_of(self, file, place), map_location="cpu", weights_only=True)
        index, target = item.storage_index, planner.resolve_tensor(item).detach()
        sizes = self._metadata.state_dict_metadata[index.fqn].chunks[index.index].sizes
        if not isinstance(stored, Tensor) or stored.shape != sizes:
            raise ValueError(f"the stored shape of {index.fqn} differs from its metadata")
        if stored.dtype != target.dtype:  # copy_ would cast silently
            raise ValueError(f"{index.fqn} is stored as {stored.dtype}, not {target.dtype}")
        box = zip(item.storage_offsets, item.lengths, strict=True)
        target.copy_(stored[tuple(slice(start, start + length) for start, length in box)])
        planner.commit_tensor(item, target)


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class _SavePlanner(DefaultSavePlanner):
    """Save planner that writes the boxes assigned to this rank."""

    def __init__(self, parts: Parts, log: Log):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts, self._progress = parts, parts.progress("saving", log, parts.written)

    def create_local_plan(self) -> SavePlan:
        items = []
        for key in self._parts.written:
            data = self._parts.offers[key]
            items.append(WriteItem(MetadataIndex(key, data.chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        tensor = self._parts.local[index.fqn]
        self._progress.add(tensor.nbytes)
        return read_once(tensor)


class _LoadPlanner(DefaultLoadPlanner):
    """Load planner that reads this rank's boxes from the stored boxes that overlap them."""

    def __init__(self, parts: Parts, log: Log):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts, self._progress = parts, parts.progress("loading", log, parts.offers)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, data in self._parts.offers.items():
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(key, stored, [data.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._parts.local[index.fqn]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        changed(tensor)
        self._progress.add(tensor.nbytes)
