"""Alignment of parameters to blocks, so that a block holds values of one parameter."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockLayout:
    """Layout of a bucket [rows, sum(sizes)], with parameters one after the other in each row, as rows of blocks.

    `rows`: the number of ranks that shard the bucket, else 1. `sizes`: a row's number of values of each parameter.
    In the blocks each parameter starts a block of `width` values, and zeros fill its last one. So the codes of a
    parameter depend on its own values alone: copies of a replicated parameter get equal codes on all tensor ranks,
    although their buckets differ. The number of blocks of a row is a multiple of `multiple`.
    """

    sizes: tuple[int, ...]
    width: int
    rows: int = 1
    multiple: int = 1

    @property
    def starts(self) -> tuple[int, ...]:
        """The place of each parameter's first value in a row of blocks."""
        return tuple(accumulate((self._aligned(size) for size in self.sizes[:-1]), initial=0))

    @property
    def blocks(self) -> int:
        """The number of blocks of a row."""
        used = sum(map(self._aligned, self.sizes)) // self.width
        return -(-used // self.multiple) * self.multiple

    def new(self, device: torch.device) -> Tensor:
        """Return zeros [rows, blocks, width], fp32."""
        return torch.zeros(self.rows, self.blocks, self.width, device=device)

    def views(self, aligned: Tensor) -> list[Tensor]:
        """Return each parameter's values [rows, size] as a view of aligned [rows, blocks, width]."""
        flat = aligned.view(self.rows, self.blocks * self.width)
        return [flat.narrow(1, start, size) for start, size in zip(self.starts, self.sizes, strict=True)]

    def pack(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """Return flat [rows, sum(sizes)], or a vector of as many values, as blocks [rows, blocks, width], fp32.

        `out`: the blocks to write, whose padding stays as it is; None: new ones.
        """
        out = self.new(flat.device) if out is None else out
        parts = flat.view(self.rows, -1).split(self.sizes, dim=1)
        for view, part in zip(self.views(out), parts, strict=True):
            view.copy_(part)
        return out

    def unpack(self, aligned: Tensor) -> Tensor:
        """Return the values [rows, sum(sizes)] of aligned [rows, blocks, width]."""
        return torch.cat(self.views(aligned), dim=1)

    def mask(self, device: torch.device) -> Tensor:
        """Return bool [rows, blocks, width], False where there is padding."""
        mask = torch.zeros(self.rows, self.blocks, self.width, dtype=torch.bool, device=device)
        for view in self.views(mask):
            view.fill_(True)
        return mask

    def _aligned(self, size: int) -> int:
        return -(-size // self.width) * self.width
