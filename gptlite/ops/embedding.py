"""Rows of a table that the output head shares: one gradient for both, where the step of a CPU would else make two.

A dense gradient of the embedding is zeros but for a row a token. To write it, and to add it to the head's, moves 16
bytes for each number of the table.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptlite.ops.weight_copies import copy_of


class TableGradient:
    """Of one forward pass: what the head adds to the gradient of the table, until the embedding takes it.

    Autograd gives the table its gradient from the embedding alone, whose backward pass comes after the head's.
    """

    def __init__(self) -> None:
        self._value: Tensor | None = None

    def put(self, gradient: Tensor) -> None:
        """Of the head's backward pass; `gradient` is the table's from now on, to be written to."""
        self._value = gradient

    def take(self) -> Tensor | None:
        """What was put, once."""
        value, self._value = self._value, None
        return value


def embedding(tokens: Tensor, table: Tensor, shared: TableGradient) -> Tensor:
    """The rows [..., D] of the table [V, D] that tokens [...] name. The head puts its gradient of it into `shared`."""
    return _Embedding.apply(tokens, table, shared)


def copied_rows(tokens: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Those rows in a 16-bit dtype, read from the table's copy of it, see weight_copies.py; None if there is none.

    As rows of the table that are then cast, in a third of the bytes. The table's gradient is summed in its own dtype.
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
        ctx.shared, ctx.like, ctx.shape = shared, table.new_empty(0), table.shape
        return F.embedding(tokens, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        (tokens,) = ctx.saved_tensors
        gradient = ctx.shared.take()
        if gradient is None:  # no loss was taken of this pass
            gradient = ctx.like.new_zeros(ctx.shape)
        return None, gradient.to(ctx.like.dtype).index_add_(0, tokens.flatten(), dy.flatten(0, -2)), None
