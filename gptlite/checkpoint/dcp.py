"""The seam to torch.distributed.checkpoint (DCP): what its defaults leave open is closed here.

Seen in torch 2.13: it wraps every error, Ctrl-C too, into a BaseException; it unpickles `.metadata` without limits;
it loads a gap in a tensor's chunks without a word; it syncs `.metadata` before its buffer is flushed (the manifest
syncs all files again, so DCP's own sync is off); it sends errors between ranks in a form that does not always pickle,
and then they all wait. So it never sees an error of writing: that is kept, and told afterwards.

DCP gets plain local tensors and the boxes of the whole that they are, so that `.metadata` knows keys, global shapes and
boxes, and nothing of ranks, meshes or DTensors. A box that several ranks hold is written by one of them.
"""

import pickle
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from gptlite.checkpoint.dcp_plugins import BoxLoadPlanner, BoxSavePlanner, MetadataUnpickler, Reader, Writer
from gptlite.checkpoint.manifest import Entries
from gptlite.checkpoint.parts import Parts, check_coverage, described
from gptlite.parallelism.mesh import Mesh
from gptlite.parallelism.rank_sync import from_all
from gptlite.progress import Log

# Said at every save and load of one process. For good: warnings.catch_warnings is not for threads.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def write(
    folder: Path,
    parts: Parts,
    log: Log,
    mesh: Mesh,
    group: dist.ProcessGroup | None,
    agree: dist.ProcessGroup | None = None,
) -> tuple[Entries, Entries]:
    """Writes tensors, each under its global key, into a new `folder`: each rank its share, each box once.

    Returns, on every rank, what a manifest holds of all ranks' tensors and of the files they wrote, named relative to
    `folder`. To be called by all ranks; DCP talks over `group`, None for one rank, and errors are agreed on as
    `main_rank.from_all` does it, over `agree`. What one of them raises, all raise: OSError for a full disk, say.
    """
    writer = Writer(folder)
    planner = BoxSavePlanner(parts, log)
    with _plain_errors():
        metadata = save(parts.local, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    files = from_all(mesh, lambda: writer.outcome(metadata, parts), agree)
    return described(metadata), {name: entry for each in files for name, entry in each.items()}


def read(folder: Path, into: Mapping[str, Tensor], log: Log, files: Collection[str] | None = None) -> None:
    """Reads this rank's part of the given tensors in place. Keys, shapes and dtypes must have been compared before.

    `files` are those below `folder` that may be read; None for any. Raises, in one line, pickle.UnpicklingError if
    `.metadata` is anything but a pickle of DCP's own classes, ValueError for missing pieces and what is no tensor.
    """
    parts = Parts(into)
    metadata = _read_metadata(folder / ".metadata", parts, files)
    try:
        with _plain_errors():
            load(parts.local, storage_reader=Reader(folder, metadata), planner=BoxLoadPlanner(parts, log), no_dist=True)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except pickle.UnpicklingError as error:  # not in torch's words: they tell how to load it with the door open
        raise ValueError("what stands in place of a tensor is none") from error
    except Exception as error:
        words = (str(error).splitlines() or [""])[0]
        raise ValueError(f"a tensor cannot be read: {type(error).__name__}: {words:.150}") from error


def _read_metadata(path: Path, parts: Parts, files: Collection[str] | None) -> Metadata:
    """What stands where, for these parts."""
    try:
        with open(path, "rb") as file:
            metadata = MetadataUnpickler(file).load()
    except Exception as error:  # a pickle of anything raises anything
        words = " ".join(str(error).split())
        raise pickle.UnpicklingError(f"data/.metadata: {type(error).__name__}: {words}"[:300]) from None
    try:
        check_coverage(metadata, parts.described)
        named = {place.relative_path for place in metadata.storage_data.values()}
        transformed = any(place.transform_descriptors for place in metadata.storage_data.values())
    except (AttributeError, TypeError, KeyError):
        raise ValueError("data/.metadata is not what torch.distributed.checkpoint writes") from None
    if transformed:
        raise ValueError("data/.metadata says that tensors are compressed or otherwise transformed")
    if files is not None and (strange := named - set(files)):
        raise ValueError(f"data/.metadata names {min(strange)!r:.100}, which is no file of the checkpoint")
    return metadata


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Lets the original exception out: a full disk stays an OSError, Ctrl-C a KeyboardInterrupt."""
    try:
        yield
    except CheckpointException as error:
        original, _ = next(iter(error.failures.values()))
        raise original from None
