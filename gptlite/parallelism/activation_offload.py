"""Activations in host memory from a block's forward pass to its backward pass: moved there, not computed again.

On a GPU a second stream copies beside the computation: to pinned memory while the next block runs, and back while the
block behind it (the next of the backward pass) does; two blocks' activations are on the device at a time. On a CPU the
copies are made all the same, which saves nothing and shows that the numbers are those without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gptlite.parallelism.zero import local_tensor

SMALLEST = 2**14  # bytes: statistics of rows are not worth a copy


@dataclass
class Moved:
    """A tensor in host memory."""

    host: Tensor
    device: torch.device
    there: Tensor | None = None  # on its way back
    event: torch.Event | None = None  # the copy that it waits for

    def fetch(self, stream: torch.cuda.Stream) -> None:
        """Begins to bring it back."""
        if self.there is None:
            with torch.cuda.stream(stream):
                self.there = self.host.to(self.device, non_blocking=True)
                self.event = stream.record_event()

    def take(self) -> Tensor:
        """On the device, for the stream that asks. A backward pass in two halves asks twice."""
        if self.event is None:
            return self.host
        current, there = torch.cuda.current_stream(self.device), self.there
        current.wait_event(self.event)
        if there is None:
            return self.host.to(self.device, non_blocking=True)
        there.record_stream(current)
        self.there = None
        return there


@dataclass
class Saved:
    """What a block's forward pass has saved, and the block before it on this rank."""

    before: Saved | None
    tensors: list[Moved] = field(default_factory=list)
    fetched: bool = False


class ActivationOffload:
    """The blocks of a part, in the order that they run: `wrap` each."""

    def __init__(self) -> None:
        self._last: Saved | None = None
        self._stream: torch.cuda.Stream | None = None

    def wrap(self, block: nn.Module, first: bool) -> None:
        """Replaces a block's forward, so that its parameters keep their names."""
        forward = block.forward

        def offloaded(*args: object) -> object:
            saved = self._last = Saved(None if first else self._last)
            # Parameters stay where they are: they are no activations, and ZeRO frees them itself.
            kept = {local_tensor(p).untyped_storage().data_ptr() for p in block.parameters()}
            with saved_tensors_hooks(lambda tensor: self._pack(saved, kept, tensor), self._unpacker(saved)):
                return forward(*args)

        block.forward = offloaded

    def _pack(self, saved: Saved, kept: set[int], tensor: Tensor) -> Tensor | Moved:
        if tensor.nbytes < SMALLEST or tensor.untyped_storage().data_ptr() in kept:
            return tensor.detach()  # itself, if it is the node's output, would be a cycle of references
        moved = self._to_host(tensor)
        saved.tensors.append(moved)
        return moved

    def _to_host(self, tensor: Tensor) -> Moved:
        if tensor.device.type != "cuda":
            return Moved(tensor.detach().clone(), tensor.device)
        stream = self._stream = self._stream or torch.cuda.Stream(tensor.device)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host.copy_(tensor.detach(), non_blocking=True)
            event = stream.record_event()
        tensor.record_stream(stream)
        return Moved(host, tensor.device, event=event)

    def _unpacker(self, saved: Saved) -> Callable[[Tensor | Moved], Tensor]:
        def unpack(packed: Tensor | Moved) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            if self._stream is not None:
                for each in (saved, saved.before):
                    self._fetch(each)
            return packed.take()

        return unpack

    def _fetch(self, saved: Saved | None) -> None:
        if saved is None or saved.fetched or self._stream is None:
            return
        saved.fetched = True
        for moved in saved.tensors:
            moved.fetch(self._stream)
