"""Offload of activations to host memory between a block's forward and backward pass, instead of recomputation.

On a GPU the copies run on a second stream and overlap with computation: a block's activations are copied to pinned
memory while the next block's forward pass runs, and copied back while the next block's backward pass runs. At most two
blocks' activations are on the device at a time. On a CPU the copies are made too: they save no memory there, but tests
use them to check that results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gptlite.parallelism.boxes import local_tensor

SMALLEST = 2**14  # bytes: smaller tensors, such as row statistics, are not worth a copy


@dataclass
class OffloadedTensor:
    """Tensor offloaded to host memory."""

    host: Tensor
    device: torch.device
    there: Tensor | None = None  # the copy on the device; set by `fetch`, cleared by `take`
    event: torch.Event | None = None  # recorded after the last copy

    def fetch(self, stream: torch.cuda.Stream) -> None:
        """Start the copy back to the device, if it has not been started."""
        if self.there is None:
            with torch.cuda.stream(stream):
                self.there = self.host.to(self.device, non_blocking=True)
                self.event = stream.record_event()

    def take(self) -> Tensor:
        """Return the tensor on the device, ready for the current stream.

        A backward pass that is split into an input-gradient and a weight-gradient pass calls this once in each.
        """
        if self.event is None:
            return self.host
        current, there = torch.cuda.current_stream(self.device), self.there
        current.wait_event(self.event)  # orders the streams on the device, without blocking the host
        if there is None:  # already taken by the input-gradient pass of a split backward pass
            return self.host.to(self.device, non_blocking=True)
        there.record_stream(current)
        self.there = None
        return there


@dataclass
class Saved:
    """Tensors saved by a block's forward pass. `before` holds those of the previous block of the part."""

    before: Saved | None
    tensors: list[OffloadedTensor] = field(default_factory=list)
    fetched: bool = False


class ActivationOffload:
    """Activation offload for the blocks of a model part. Call `wrap` on each block, in execution order."""

    def __init__(self) -> None:
        self._last: Saved | None = None
        self._stream: torch.cuda.Stream | None = None

    def wrap(self, block: nn.Module, first: bool) -> None:
        """Replace a block's forward method with one that offloads the tensors saved for the backward pass.

        `first` marks the part's first block.
        """
        forward = block.forward

        def offloaded(*args: object, **kwargs: object) -> object:
            saved = self._last = Saved(None if first else self._last)
            # Parameters are not activations, and ZeRO frees gathered ones itself.
            # The addresses are read at each call, since ZeRO gathers parameters into new memory.
            kept = {local_tensor(p).untyped_storage().data_ptr() for p in block.parameters()}
            with saved_tensors_hooks(lambda tensor: self._pack(saved, kept, tensor), self._unpacker(saved)):
                return forward(*args, **kwargs)

        block.forward = offloaded

    def _pack(self, saved: Saved, kept: set[int], tensor: Tensor) -> Tensor | OffloadedTensor:
        if tensor.nbytes < SMALLEST or tensor.untyped_storage().data_ptr() in kept:
            return tensor.detach()  # saving a node's own output would create a reference cycle
        moved = self._to_host(tensor)
        saved.tensors.append(moved)
        return moved

    def _to_host(self, tensor: Tensor) -> OffloadedTensor:
        if tensor.device.type != "cuda":
            return OffloadedTensor(tensor.detach().clone(), tensor.device)
        stream = self._stream = self._stream or torch.cuda.Stream(tensor.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)  # asynchronous copies need pinned memory
        stream.wait_stream(torch.cuda.current_stream(tensor.device))  # the values must be computed before the copy
        with torch.cuda.stream(stream):
            host.copy_(tensor.detach(), non_blocking=True)
            event = stream.record_event()
        tensor.record_stream(stream)  # the allocator must not reuse the memory before the copy has read it
        return OffloadedTensor(host, tensor.device, event=event)

    def _unpacker(self, saved: Saved) -> Callable[[Tensor | OffloadedTensor], Tensor]:
        def unpack(packed: Tensor | OffloadedTensor) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            if self._stream is not None:
                for each in (saved, saved.before):  # `before` comes next in the backward pass: a prefetch
                    self._fetch(each)
            return packed.take()

        return unpack

    def _fetch(self, saved: Saved | None) -> None:
        if saved is None or saved.fetched or self._stream is None:
            return
        saved.fetched = True
        for moved in saved.tensors:
            moved.fetch(self._stream)


def offload_activations(blocks: Sequence[nn.Module]) -> None:
    """Offload the activations of the blocks of a model part, given in execution order."""
    offload = ActivationOffload()
    for block in blocks:
        offload.wrap(block, first=block is blocks[0])
