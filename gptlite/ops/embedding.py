"""Embedding whose weight is shared with the output head, on a CPU: one gradient of the weight instead of two.

A dense gradient of the embedding is zero except for one row per token. Writing it and adding it to the head's gradient
would move 16 bytes per element of the weight.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptlite.ops.weight_copies import copy_of


class TableGradient:
    """Holder of the head's gradient of the shared weight, until the embedding's backward pass takes it.

    Autograd gets the weight's gradient only from the embedding, whose backward pass runs after the head's.
    """

    def __init__(self) -> None:
        self._value: Tensor | None = None

    def put(self, gradient: Tensor) -> None:
        """Store a gradient, in the head's backward pass. The embedding's backward pass adds to it in place."""
        self._value = gradient

    def take(self) -> Tensor | None:
        """Return the stored gradient and clear it."""
        value, self._value = self._value, None
        return value


def embedding(tokens: Tensor, table: Tensor, shared: TableGradient) -> Tensor:
    """Return the rows [..., D] of `table` [V, D] at tokens [...]. The head stores its gradient of `table` in
    `shared`."""
    return _Embedding.apply(tokens, table, shared)


def copied_rows(tokens: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the rows of `table` in a 16-bit dtype from its copy (weight_copies.py); None without a valid copy.

    The result equals a cast of the rows, and computing it moves a third of the bytes. The gradient is summed in the
    dtype of `table`.
    """
    copy = copy_of(table)
    return None if copy is None or copy.dtype != dtype else _CopiedRows.apply(tokens, table, copy)


class _CopiedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, copy: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows, ctx.dtype = len(table), table.dtype
        return F.embedding(tokens, copy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        (tokens,) = ctx.saved_tensors
        return None, torch.ops.aten.embedding_dense_backward(dy.to(ctx.dtype), tokens, ctx.rows, -1, False), None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, shared: TableGradient) -> Tensor:
        ctx.save_for_backward(tokens)
        # `like`: dtype and device, without the table
        ctx.shared, ctx.like, ctx.shape = shared, table.new_empty(0), table.shape
        return F.embedding(tokens, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        (tokens,) = ctx.saved_tensors
        gradient = ctx.shared.take()
        if gradient is None:  # no loss was computed in this pass
            gradient = ctx.like.new_zeros(ctx.shape)
        return None, gradient.to(ctx.like.dtype).index_add_(0, tokens.flatten(), dy.flatten(0, -2)), None
