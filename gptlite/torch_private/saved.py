"""torch.distributed.checkpoint: classes in its metadata, its checks of boxes, and its slices of files."""

from typing import IO, Any

from torch.distributed.checkpoint.default_planner import _check_box_bounds as is_inside
from torch.distributed.checkpoint.default_planner import _check_box_overlap as boxes_overlap
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormat
from torch.serialization import _get_layout as layout_named

__all__ = ("MemoryFormat", "StorageInfo", "boxes_overlap", "is_inside", "layout_named")

# Module and name by which a pickle refers to them.
LAYOUT_NAMED = ("torch.serialization", "_get_layout")
MEMORY_FORMAT = ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
STORAGE_INFO = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")


def slice_of(reader: FileSystemReader, file: IO[bytes], place: Any) -> Any:
    """Return a tensor's part of an open file."""
    return reader._slice_file(file, place)
