"""Context parallelism: sequences are split over ranks, which all-gather keys and values.

The method is that of Llama 3 (arXiv:2407.21783, section 3.3.2).

A rank holds two chunks of every sequence (see layout.chunk_starts), concatenated in its tensors. All layers except
attention work on each position independently. Attention keeps its queries local and gathers keys and values of all
positions; the backward pass reduce-scatters their gradients. Gathered keys and values are freed after the forward pass
and gathered again before the backward pass, so that saved activations are split as well.

Shapes: B sequences of length S, s = S / C on each of C ranks, H key-value heads with G query heads each, head size D.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gptlite.parallelism.axes import CONTEXT
from gptlite.parallelism.layout import chunk_starts
from gptlite.parallelism.mesh import Mesh
from gptlite.torch_private.distributed import all_gather_single, reduce_scatter_single

KeysAndValues = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class ContextAxis:
    """Context-parallel ranks, which share each sequence. All layers of a model hold the same object.

    `refill`: free gathered keys and values after the forward pass and gather them again for the backward pass. It is
    off if blocks are recomputed, as their activations are freed anyway. `whole`: sequences are temporarily not split.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    refill: bool
    whole: bool = False

    @contextmanager
    def whole_sequence(self) -> Iterator[None]:
        """Disable splitting inside the `with` block: every rank has the whole sequence, as in generation."""
        self.whole = True
        try:
            yield
        finally:
            self.whole = False

    def starts(self, length: int) -> tuple[int, int]:
        """Return the starts of this rank's two chunks in the whole sequence. `length` is the local sequence length."""
        return chunk_starts(self.size * length, self.size, self.rank)

    def positions(self, first: int, count: int, length: int) -> tuple[int, int]:
        """Map a slice of this rank's `length` positions to the whole sequence. It has `count` positions and starts at
        `first`.

        Return the global position of the slice's start, and the gap in the whole sequence between the slice's two
        halves, which is 0 if the slice is contiguous.
        """
        early, late = self.starts(length)
        gap, chunk = late - early - length // 2, length // 2
        if first >= chunk:
            return early + first + gap, 0
        # Slices are equally long, so a slice that spans both chunks has half of its positions in each.
        return early + first, gap if first + count > chunk else 0

    def gather_keys_and_values(self, qkv: Tensor) -> tuple[KeysAndValues, list[Tensor]]:
        """Gather keys and values. Return those visible to each of this rank's two chunks: [B, H, end of the chunk, D].

        qkv is [B, s, H, G + 2, D]. With `refill`, the returned list holds the tensor that owns the memory of the keys
        and values; otherwise it is empty.
        """
        memory: list[Tensor] = []
        k0, v0, k1, v1 = _Gather.apply(qkv, self, memory)
        return ((k0, v0), (k1, v1)), memory

    def free_until_backward(self, out: Tensor, qkv: Tensor, memory: list[Tensor]) -> Tensor:
        """Return `out`, attention's output, and free the gathered keys and values until attention's backward pass."""
        return _GiveBack.apply(out, qkv, memory, self) if memory and out.requires_grad else out


def context_axis(mesh: Mesh, refill: bool) -> ContextAxis | None:
    """Return the context axis of a mesh; None if sequences are not split. `refill` as in ContextAxis."""
    size = mesh.size(CONTEXT)
    return ContextAxis(mesh.group(CONTEXT), size, mesh.coordinate(CONTEXT), refill) if size > 1 else None


def context_of(part: nn.Module) -> ContextAxis | None:
    """Return the axis over which a part's sequences are split; None if they are not split."""
    axes = (getattr(module, "context", None) for module in part.modules())
    return next((axis for axis in axes if isinstance(axis, ContextAxis)), None)


class _Gather(torch.autograd.Function):
    """All-gather of keys and values in position order. The backward pass reduce-scatters their gradients."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, axis: ContextAxis, memory: list[Tensor]) -> Annotated[Any, "S(1) -> R"]:
        batch, length, heads, _, width = qkv.shape
        whole = qkv.new_empty(2, batch, heads, axis.size * length, width)
        _fill(whole, qkv, axis)
        if axis.refill:
            memory.append(whole)
        ctx.axis, ctx.shape, ctx.memory = axis, qkv.shape, memory
        ends = [start + length // 2 for start in axis.starts(length)]  # causal: no query sees beyond its chunk's end
        return tuple(whole[which, :, :, :end] for end in ends for which in (0, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        axis = ctx.axis
        ctx.memory.clear()  # graph nodes outlive the backward pass and would keep this memory alive
        batch, length, heads, _, width = ctx.shape
        chunk = length // 2
        ranks = grads[0].new_zeros(axis.size, 2, batch, heads, 2, chunk, width)
        for index, (rank, half) in enumerate(_owners(axis.size)):
            start, end = index * chunk, (index + 1) * chunk
            for which, grad in enumerate(grads):  # of the early chunk's keys and values, then of the late chunk's
                if grad.shape[2] >= end:  # queries of the early chunk see no keys after it
                    ranks[rank, which % 2, :, :, half] += grad[:, :, start:end]
        own = ranks.new_empty(ranks.shape[1:])
        reduce_scatter_single(own.view(1, -1), ranks.view(axis.size, -1), group=axis.group)
        dqkv = grads[0].new_zeros(ctx.shape)  # zeros for the queries, which attention reads from qkv directly
        dqkv[:, :, :, -2:] = own.view(2, batch, heads, length, width).permute(1, 3, 2, 0, 4)
        return dqkv, None, None


class _GiveBack(torch.autograd.Function):
    """Identity on `out` that frees the memory of keys and values; its backward pass gathers them again first."""

    @staticmethod
    def forward(ctx, out: Tensor, qkv: Tensor, memory: list[Tensor], axis: ContextAxis) -> Annotated[Tensor, "V -> V"]:
        ctx.save_for_backward(qkv)
        storage = memory[0].untyped_storage()
        ctx.memory, ctx.axis, ctx.bytes = memory, axis, storage.nbytes()
        storage.resize_(0)  # frees the memory while the graph still refers to the tensor
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        (qkv,) = ctx.saved_tensors
        for whole in ctx.memory:
            whole.untyped_storage().resize_(ctx.bytes)
            _fill(whole.data, qkv, ctx.axis)  # `.data`: autograd must not count this as an in-place change
        return grad, None, None, None


def _fill(whole: Tensor, qkv: Tensor, axis: ContextAxis) -> None:
    """Gather all ranks' keys and values into `whole` [2, B, H, S, D]."""
    batch, length, heads, _, width = qkv.shape
    own = qkv[:, :, :, -2:].permute(3, 0, 2, 1, 4).contiguous()
    ranks = own.new_empty(axis.size, own.numel())
    all_gather_single(ranks, own.view(1, -1), group=axis.group)
    ranks = ranks.view(axis.size, 2, batch, heads, 2, length // 2, width)
    for index, (rank, half) in enumerate(_owners(axis.size)):
        start = index * (length // 2)
        whole[:, :, :, start : start + length // 2] = ranks[rank, :, :, :, half]


def _owners(size: int) -> list[tuple[int, int]]:
    """Return for each chunk of a sequence the rank that holds it, and the chunk's index there (0 or 1)."""
    return [(rank, 0) for rank in range(size)] + [(rank, 1) for rank in reversed(range(size))]
