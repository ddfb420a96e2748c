"""The parts of a checkpoint's tensors that a rank holds, and the choice of the rank that writes each part."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData

from gptlite.checkpoint.manifest import Entries, in_words, spell
from gptlite.parallelism.boxes import local_box, local_tensor
from gptlite.parallelism.in_files import read_once
from gptlite.progress import Log, Progress

Offer = tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]  # offset and sizes of a box, and its tensor's `spell`


class Parts:
    """This rank's parts of tensors, by checkpoint key.

    A part is a box, given by its offset and sizes in the global tensor. `local` has the elements of each part, `offers`
    its description for DCP. After `share`, `written` lists the keys whose box this rank writes, `described` has the
    manifest entries of all ranks' tensors, `total_bytes` is the total size of these tensors, in `boxes` boxes that
    `writers` ranks write. Raises TypeError for values that are not tensors, ValueError for a local shape that does not
    match the placements.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        for key, value in tensors.items():
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                raise TypeError(f"checkpoint key {key} is a {kind}, not a tensor: put it into `meta`")
        self.local = {key: local_tensor(tensor).detach() for key, tensor in tensors.items()}
        self.offers: dict[str, TensorWriteData] = {}
        for key, tensor in tensors.items():
            shape, offset = local_box(tensor)
            if shape != tuple(self.local[key].shape):
                held = list(self.local[key].shape)
                raise ValueError(
                    f"checkpoint key {key}: shape {held} on this rank, but its layout requires {list(shape)}"
                )
            # An empty part of a non-empty tensor is not stored. An empty tensor is stored, so that its key exists.
            if self.local[key].numel() or not tensor.numel():
                box = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
                self.offers[key] = TensorWriteData(box, TensorProperties(tensor.dtype), tensor.shape)
        self.written: list[str] = []
        self.described: Entries = {}
        self.total_bytes = self.boxes = self.writers = 0

    @property
    def offered(self) -> dict[str, Offer]:
        """Offset, sizes and description of each offer, for the other ranks."""
        return {
            key: (tuple(each.chunk.offsets), tuple(each.chunk.sizes), spell(each.size, each.properties.dtype))
            for key, each in self.offers.items()
        }

    def share(self, offers: Sequence[Mapping[str, Offer]], rank: int) -> None:
        """Assign each box to one of the ranks that hold it: the one with the fewest bytes to write so far.

        `offers` has the attribute `offered` of every rank's Parts, in rank order, so all ranks compute the same
        assignment. Raises ValueError if the shape or dtype of a key differs between ranks.
        """
        holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for holder, offered in enumerate(offers):
            for key, (offset, _, here) in offered.items():
                holders.setdefault((key, offset), []).append(holder)
                if here != (told := self.described.setdefault(key, here)):
                    words = f"{in_words(here)} on rank {holder}, but {in_words(told)} on a lower rank"
                    raise ValueError(f"checkpoint key {key} is {words}")
        load, writers = [0] * len(offers), set()
        for (key, _), ranks in holders.items():
            writer = min(ranks, key=lambda holder: load[holder])  # a tie goes to the lowest rank, on all ranks alike
            _, sizes, described = offers[writer][key]
            load[writer] += prod(sizes) * getattr(torch, described["dtype"]).itemsize
            writers.add(writer)
            if writer == rank:
                self.written.append(key)
        self.total_bytes, self.boxes, self.writers = sum(load), len(holders), len(writers)

    def stage(self, buffers: dict[str, Tensor]) -> None:
        """Copy the tensors that this rank writes to CPU buffers, so that training can continue.

        Later saves reuse `buffers`.
        """
        for key in self.written:
            source = self.local[key]
            buffer = buffers.get(key)
            # Pinned memory is slow to allocate, so buffers are kept for the next save.
            if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
                buffers[key] = buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            buffer.copy_(read_once(source), non_blocking=True)
        if any(self.local[key].is_cuda for key in self.written):
            torch.cuda.current_stream().synchronize()  # otherwise the next step could change tensors during the copy
        self.local = {key: buffers[key] for key in self.written}  # no live tensor is read from here on

    def progress(self, label: str, log: Log, keys: Iterable[str]) -> Progress:
        """Return a progress log of the bytes in this rank's parts of `keys`."""
        return Progress(f"checkpoint: {label}", sum(self.local[key].nbytes for key in keys), log)
