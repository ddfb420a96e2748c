"""Embedding whose weight is shared with the output head: one gradient of the weight instead of two.

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


def embedding(tokens: Tensor, table: Tensor, dtype: torch.dtype, shared: TableGradient | None = None) -> Tensor | None:
    """Return the rows [..., D] of `table` [V, D] at tokens [...]; None if F.embedding does no more than this function.

    A valid copy of `table` in `dtype` (weight_copies.py) has the same rows as a cast, for a third of the bytes. The
    gradient is summed in the dtype of `table`, and added to the head's in `shared`: on a GPU by our kernel, in an order
    that the tokens determine.
    """
    copy = copy_of(table)
    copy = None if copy is None or copy.dtype != dtype else copy
    return None if copy is None and shared is None else _Embedding.apply(tokens, table, copy, shared)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, copy: Tensor | None, shared: TableGradient | None) -> Tensor:
        ctx.save_for_backward(tokens)
        # `like`: dtype and device, without the table
        ctx.shared, ctx.like, ctx.shape = shared, table.new_empty(0), table.shape
        return F.embedding(tokens, table if copy is None else copy)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        (tokens,), dtype = ctx.saved_tensors, ctx.like.dtype
        if ctx.shared is None:
            dense = torch.ops.aten.embedding_dense_backward(dy.to(dtype), tokens, ctx.shape[0], -1, False)
            return None, dense, None, None
        gradient, rows = ctx.shared.take(), dy.flatten(0, -2)
        if gradient is None:  # no loss was computed in this pass
            gradient = ctx.like.new_zeros(ctx.shape)
        gradient = gradient.to(dtype)
        if dy.device.type == "cpu":
            gradient.index_add_(0, tokens.flatten(), rows.to(dtype))
        else:
            torch.ops.gptlite.add_token_rows_(gradient, rows, *tokens.flatten().sort(stable=True))
        return None, gradient, None, None
