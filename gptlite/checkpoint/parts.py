"""A rank's parts of the tensors of a checkpoint: which it writes, and whether the stored ones are whole."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from gptlite.checkpoint.manifest import Entries, describe, spell
from gptlite.parallelism.boxes import local_box, local_part
from gptlite.progress import Log, Progress


@dataclass(frozen=True)
class Offer:
    """What a rank has of a tensor: the whole's description, the box, the bytes."""

    described: dict[str, Any]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    bytes: int


class Parts:
    """By key: the elements that this rank holds, the box of the whole that they are, and the whole's description.

    `written` are the keys whose box this rank writes: all, until `share`. Raises TypeError for anything but a tensor.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        for key, value in tensors.items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"checkpoint key {key} is a {type(value).__name__}: tensors only, the rest goes into meta"
                )
        self.described = {key: describe(tensor) for key, tensor in tensors.items()}
        self.local = {key: local_part(tensor) for key, tensor in tensors.items()}
        self.chunks: dict[str, ChunkStorageMetadata] = {}
        for key, tensor in tensors.items():
            shape, offset = local_box(tensor)
            if shape != tuple(self.local[key].shape):
                held = list(self.local[key].shape)
                raise ValueError(f"checkpoint key {key}: this rank holds {held}, its layout says {list(shape)}")
            # An empty part of something is not stored, nor read; of nothing, it says that there is the key.
            if prod(shape) or not tensor.numel():
                self.chunks[key] = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
        self.written = list(self.chunks)
        self.total_bytes = self._bytes(self.written)  # of all ranks, once they are known

    def offers(self) -> dict[str, Offer]:
        """What the other ranks are told, to `share`."""
        return {
            key: Offer(self.described[key], tuple(chunk.offsets), tuple(chunk.sizes), self.local[key].nbytes)
            for key, chunk in self.chunks.items()
        }

    def share(self, offers: Sequence[Mapping[str, Offer]], rank: int) -> None:
        """Leaves each box to one of the ranks that hold it, the one with the least to write so far; all decide alike.

        `offers` are those of all ranks, in their order. Raises ValueError where ranks mean different tensors by a key.
        """
        holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for each, offer in enumerate(offers):
            for key, box in offer.items():
                holders.setdefault((key, box.offset), []).append(each)
        load = [0] * len(offers)
        self.written = []
        for (key, _), ranks in holders.items():
            boxes = [offers[each][key] for each in ranks]
            for each, box in zip(ranks, boxes, strict=True):
                if box != boxes[0]:
                    raise ValueError(f"checkpoint key {key} is {box} on rank {each}, {boxes[0]} on rank {ranks[0]}")
            writer = min(ranks, key=lambda each: load[each])
            load[writer] += boxes[0].bytes
            if writer == rank:
                self.written.append(key)
        self.total_bytes = sum(load)

    def stage(self, buffers: dict[str, Tensor]) -> None:
        """Copies what this rank writes, so that training may go on. `buffers` are kept from one save to the next."""
        for key in self.written:
            source = self.local[key]
            buffer = buffers.get(key)
            if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
                buffers[key] = buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            buffer.copy_(source, non_blocking=True)
        if any(self.local[key].is_cuda for key in self.written):
            torch.cuda.current_stream().synchronize()
        self.local = {key: buffers[key] for key in self.written}

    def progress(self, label: str, log: Log, keys: Iterable[str]) -> Progress:
        """For work on this rank's elements of some keys."""
        return Progress(f"checkpoint: {label}", self._bytes(keys), log)

    def _bytes(self, keys: Iterable[str]) -> int:
        return sum(self.local[key].nbytes for key in keys)


def described(metadata: Metadata) -> Entries:
    """What a manifest holds of the tensors, of all ranks."""
    entries = metadata.state_dict_metadata.items()
    return {key: spell(e.size, e.properties.dtype) for key, e in entries if isinstance(e, TensorStorageMetadata)}


def check_coverage(metadata: Metadata, described: Entries) -> None:
    """Every element of every tensor lies in a stored chunk. (That chunks don't overlap, DCP checks when it saves.)"""
    for key, wanted in described.items():
        entry = metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata) or spell(entry.size, entry.properties.dtype) != wanted:
            raise ValueError(f"checkpoint key {key} is not stored as {wanted['dtype']} {wanted['shape']}")
        stored = sum(prod(chunk.sizes) for chunk in entry.chunks)
        if stored != prod(entry.size):
            raise ValueError(f"checkpoint key {key} is stored in part: {stored} of {prod(entry.size)} elements")
