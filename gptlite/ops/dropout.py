"""Dropout with a mask that is a pure function of an element's position, independent of the rank that computes it.

The mask comes from the counter-based generator Philox4x32-10 (Salmon et al., SC'11), with key (seed, site) and counter
(element // 4, position, sample id, head). It therefore does not depend on the layout, needs no state in a checkpoint,
and is the same when activation checkpointing recomputes it.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptlite.ops.philox import WORD, philox


@dataclass(frozen=True)
class DropoutKey:
    """Key of a mask: the run's seed, the dropout's site in the model, and the global sample numbers of the batch.

    For a shard of a tensor, `first_position` and `first_head` are its offsets; the shard gets the corresponding part of
    the whole mask. Its positions are contiguous, or two halves of equal length with `gap` positions between them.
    """

    seed: int  # 0 <= seed < 2**32
    site: int | Tensor  # unique to each dropout in the model; a scalar tensor gives one compiled graph for all layers
    sample_ids: Tensor  # [B] int64
    first_position: int = 0
    first_head: int = 0
    gap: int = 0


def keep_mask(shape: torch.Size, p: float, key: DropoutKey) -> Tensor:
    """Return a bool mask [B, S, C] or [B, H, S, C], False with probability p."""
    device = key.sample_ids.device
    batch, positions, width = shape[0], shape[-2], shape[-1]
    lanes = -(-width // 4)
    sample = key.sample_ids.view(batch, *[1] * (len(shape) - 1))
    position = torch.arange(key.first_position, key.first_position + positions, device=device).unsqueeze(-1)
    if key.gap:
        position[positions // 2 :] += key.gap
    head = torch.zeros_like(sample)
    if len(shape) == 4:
        head = torch.arange(key.first_head, key.first_head + shape[1], device=device).view(-1, 1, 1)
    # Sample numbers may exceed 2**32, so their upper half shares a counter word with the head.
    counter = (torch.arange(lanes, device=device), position, sample & WORD, head + ((sample >> 32) << 16))
    words = torch.broadcast_tensors(*philox(counter, (key.seed, key.site)))
    # Compare integers, so that rounding cannot differ between devices.
    return torch.stack(words, dim=-1).flatten(-2)[..., :width] >= int(p * 2**32)


def dropout(x: Tensor, p: float, key: DropoutKey | None, fused: bool = False) -> Tensor:
    """Return x [B, S, C] or [B, H, S, C] with elements zeroed with probability p and the rest scaled by 1/(1-p).

    `key=None` (evaluation) or p=0 returns x itself.
    """
    if key is None or p == 0.0:
        return x
    if fused and key.gap:  # the kernel supports only contiguous positions
        halves = x.split(x.shape[-2] // 2, -2)
        return torch.cat([_Dropout.apply(h, *kernel_key(p, k)) for h, k in zip(halves, runs(key, x), strict=True)], -2)
    if fused:
        return _Dropout.apply(x, *kernel_key(p, key))
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    return torch.where(keep_mask(x.shape, p, key), x * (1.0 / (1.0 - p)), zero)


def kernel_key(p: float, key: DropoutKey | None) -> tuple[float, int, Tensor | None, Tensor | None, int, int]:
    """Return a kernel's arguments for a mask: p, seed, site, sample ids, first position and first head. Without a key,
    p is 0."""
    if key is None or p == 0.0:
        return 0.0, 0, None, None, 0, 0
    site = key.site if isinstance(key.site, Tensor) else torch.full((), key.site, device=key.sample_ids.device)
    return p, key.seed, site, key.sample_ids, key.first_position, key.first_head


def runs(key: DropoutKey, x: Tensor) -> tuple[DropoutKey, DropoutKey]:
    """Return the keys of the two halves of the positions of x [..., S, C]."""
    second = key.first_position + x.shape[-2] // 2 + key.gap
    return replace(key, gap=0), replace(key, first_position=second, gap=0)


class _Dropout(torch.autograd.Function):
    """Dropout by our kernel. The mask is not saved; the backward pass computes it again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, p: float, seed: int, site: Tensor, sample_ids: Tensor, first_position: int, first_head: int
    ) -> Tensor:
        ctx.save_for_backward(site, sample_ids)
        ctx.key = p, seed, first_position, first_head
        return torch.ops.gptlite.dropout(x, p, seed, site, sample_ids, first_position, first_head)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):
        site, sample_ids = ctx.saved_tensors
        p, seed, first_position, first_head = ctx.key
        dx = torch.ops.gptlite.dropout(dy, p, seed, site, sample_ids, first_position, first_head)
        return dx, *[None] * 6
