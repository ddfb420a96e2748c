"""Parameters and gradients in a file, read and written bucket by bucket (ZeRO-Infinity, arXiv:2104.07857, section 5).

A bucket has the parameters that FSDP2 gathers together. The file has two rows of elements: the shards of all
parameters, in the order of the buckets, and their gradients. Between uses, the shards are views of the memory-mapped
file, which initial values, checkpoints and evaluations use like any tensor. A training pass does not touch the mapping:

- Before FSDP2 gathers a bucket, its shards are read into a buffer. The order in which the last passes gathered the
  buckets says which ones come next; `ahead` of them are read while the model computes.
- After FSDP2 has reduced a bucket's gradients, they are copied to a buffer and freed. A thread adds those of earlier
  micro-batches from the file, and writes the sums.

One thread does all I/O, so that each read follows the writes before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gptlite.parallelism.boxes import cut_like, local_tensor
from gptlite.satellites.nvme.errors import told
from gptlite.satellites.nvme.state_file import ALIGN, StateFile, aligned
from gptlite.torch_private.fsdp_shards import Group, Hooks, groups

ITEM = 4  # bytes: parameters and gradients are fp32
UNIT = ALIGN // ITEM
WRITES = 2  # gradients of so many buckets wait to be written, at most
Key = tuple[int, bool]  # number of a bucket, and whether a backward pass gathers it


class Bucket:
    """Shards of a group: elements `start` to `stop` of a row. Each shard begins at a whole page, at `places`."""

    def __init__(self, group: Group, start: int) -> None:
        self.group, self.start, self.places = group, start, list[int]()
        for size in group.sizes:
            self.places.append(start)
            start += -(-size // UNIT) * UNIT
        self.stop = start
        self.summed = set[int]()  # indices of the parameters with a gradient in the file

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each shard, without padding."""
        return [local_tensor(parameter).numel() for parameter in self.group.parameters]

    @property
    def bytes(self) -> int:
        """Size of the shards, in whole pages."""
        return ITEM * (self.stop - self.start)

    def views(self, row: Tensor, sizes: Sequence[int], origin: int = 0) -> list[Tensor]:
        """Return the parts of a row, of which `row` begins at element `origin`, with `sizes` elements each."""
        return [row[at - origin : at - origin + n] for at, n in zip(self.places, sizes, strict=True)]


class _Read(NamedTuple):
    """A bucket that is being read into a buffer."""

    key: Key
    memory: memoryview
    done: Future[None]


class ParameterFile:
    """File of a rank with the parameters and gradients of `parts`, which are on the meta device and sharded by FSDP2.

    `ahead` is the number of buckets read ahead. Raises OSError if the file cannot be created.
    """

    def __init__(self, parts: Sequence[nn.Module], folder: Path, ahead: int) -> None:
        self._buckets, self.total = list[Bucket](), 0
        for group in (each for part in parts for each in groups(part)):
            self._buckets.append(Bucket(group, self.total))
            self.total = self._buckets[-1].stop
        self.file = StateFile(folder, 2 * ITEM * self.total)
        self._rows = self.file.mapped()[: 2 * self.total].view(2, self.total)
        self.thread = ThreadPoolExecutor(1, "parameters")
        self._mapped = True  # True if the mapping may have been written to
        self._ahead, self._reads, self._writes = ahead, deque[_Read](), deque[Future[None]]()
        self._after, self._before = dict[Key, Key](), None  # the next bucket after each, and the one gathered last
        # Buckets that stay gathered, such as the embedding's, are used once per pass: their buffers come and go.
        self._size = max((each.bytes for each in self._buckets if each.group.frees), default=0)
        self.buffers = [aligned(self._size) for _ in range(self._size and ahead + WRITES + 1)]
        self._free = list(self.buffers)
        for number, bucket in enumerate(self._buckets):
            bucket.group.place(bucket.views(self._rows[0], bucket.group.sizes))
            each = (partial(act, bucket) for act in (self._loaded, self._reduced))
            bucket.group.hook(Hooks(partial(self._load, number), *each))

    def maps(self, tensor: Tensor) -> bool:
        """Return True if a local tensor is part of the mapped file."""
        return tensor.untyped_storage().data_ptr() == self._rows.untyped_storage().data_ptr()

    def place_of(self, parameter: Tensor) -> int | None:
        """Return the element of a row at which a parameter's shard begins; None if it is not in the file."""
        local = local_tensor(parameter)
        at = (local.data_ptr() - self._rows.data_ptr()) // ITEM
        return at if local.numel() and 0 <= at < self.total else None

    def wait(self) -> None:
        """Wait until all reads and writes are done, and forget what was read ahead. Raises OffloadFailed."""
        while self._reads:
            self._dropped(self._reads.popleft())
        with told():
            while self._writes:
                self._writes.popleft().result()

    def settle(self) -> None:
        """Wait for I/O, so that the mapping is up to date. Changes made to it take effect at the next read."""
        self.wait()
        self._mapped = True

    def flush(self) -> None:
        """Write changes made through the mapping, and drop its pages, if there may be any."""
        if self._mapped:
            with told():
                self.file.flush()
            self._mapped = False

    def begin_update(self) -> None:
        """Wait for the gradients, before the update reads and changes the file. Raises OffloadFailed."""
        self.flush()
        self.wait()
        self._before = None  # the update comes between the last bucket of this step and the first one of the next

    def drop_gradients(self) -> None:
        """Forget the gradients of a step."""
        for bucket in self._buckets:
            bucket.summed.clear()

    def _load(self, number: int, backward: bool) -> None:
        """Let FSDP2 read a bucket's shards from a buffer. Raises OffloadFailed."""
        self.flush()
        key = number, backward
        if self._before is not None:
            self._after[self._before] = key
        self._before = key
        while self._reads and self._reads[0].key[0] != number:  # an evaluation, for example, ends otherwise
            self._dropped(self._reads.popleft())
        if not self._reads:
            self._read(key)
        read, bucket = self._reads[0]._replace(key=key), self._buckets[number]
        self._reads[0] = read
        with told():
            read.done.result()
        row = torch.frombuffer(read.memory, dtype=torch.float32)
        bucket.group.feed(bucket.views(row, bucket.group.sizes, bucket.start))

    def _loaded(self, bucket: Bucket, backward: bool) -> None:
        """Reuse the buffer of a bucket that FSDP2 has copied, and read the next ones."""
        bucket.group.feed(None)
        read = self._reads.popleft()
        if (again := self._after.get(read.key)) is not None and again[0] == read.key[0]:
            # The backward pass begins with the last bucket of the forward pass.
            self._reads.append(read._replace(key=again))
        else:
            self._give(read.memory)
        key = self._reads[-1].key if self._reads else read.key
        while len(self._reads) < self._ahead and (following := self._after.get(key)) is not None:
            if following[0] == key[0] or (backward and not following[1] and bucket.group.last):
                return  # the same buffer serves both, or the update changes what the next step reads
            self._read(following)
            key = following

    def _read(self, key: Key) -> None:
        bucket = self._buckets[key[0]]
        memory = self._take(bucket.bytes)
        part = ITEM * bucket.start, memory[: bucket.bytes]
        self._reads.append(_Read(key, memory, self.thread.submit(self.file.read, [part])))

    def _dropped(self, read: _Read) -> None:
        with told():
            read.done.result()
        self._give(read.memory)

    def _reduced(self, bucket: Bucket, gradients: list[Tensor | None]) -> None:
        """Move new gradients of a bucket to the file, where they are added to those of earlier micro-batches."""
        fresh = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if fresh:
            self.flush()
            with told():
                while len(self._writes) >= WRITES:
                    self._writes.popleft().result()
            memory = self._take(bucket.bytes)
            row = torch.frombuffer(memory, dtype=torch.float32)
            views = bucket.views(row, bucket.sizes, bucket.start)
            for view, gradient in zip(views, gradients, strict=True):
                if gradient is not None:
                    view.copy_(local_tensor(gradient).flatten())
            self._writes.append(self.thread.submit(self._add, bucket, memory, fresh, bucket.summed.copy()))
            bucket.summed.update(fresh)
        if bucket.group.last:
            views = bucket.views(self._rows[1], bucket.sizes)
            for index, parameter in enumerate(bucket.group.parameters):
                if index in bucket.summed:
                    parameter.grad = cut_like(parameter, views[index].view(local_tensor(parameter).shape))

    def _add(self, bucket: Bucket, memory: memoryview, fresh: list[int], summed: set[int]) -> None:
        """Add the gradients in the file to the `fresh` ones in memory, and write the sums. Runs on the I/O thread."""
        at, size = ITEM * (self.total + bucket.start), bucket.bytes
        if summed:
            earlier = self._take(size)
            self.file.read([(at, earlier[:size])])
            rows = [torch.frombuffer(each, dtype=torch.float32) for each in (memory, earlier)]
            sums, sizes = [bucket.views(row, bucket.group.sizes, bucket.start) for row in rows], set(fresh)
            for index in summed:
                if index in sizes:
                    sums[0][index] += sums[1][index]
                else:
                    sums[0][index].copy_(sums[1][index])
            self._give(earlier)
        self.file.write([(at, memory[:size])])
        self._give(memory)

    def _take(self, size: int) -> memoryview:
        """Return a buffer of at least `size` bytes."""
        return self._free.pop() if size <= self._size else aligned(max(size, ALIGN))

    def _give(self, memory: memoryview) -> None:
        if len(memory) == self._size:
            self._free.append(memory)
