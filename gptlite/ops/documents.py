"""Document boundaries in packed sequences, which the data loader computes on the host for the model's attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Document boundaries of a batch. `starts` int64 [B, S]: for each position, the first position of its document.

    `ends` int32 [B, K]: the end of each document in the concatenation of all rows. A row with fewer than K documents
    repeats its own end, which adds documents of length 0. `longest`: an upper bound on the length of a document. K and
    `longest` are powers of two, or S, so that there are few distinct shapes. Both are known without a device
    synchronization.
    """

    starts: Tensor
    ends: Tensor | None = None
    longest: int = 0

    def each(self, change: Callable[[Tensor], Tensor]) -> Documents:
        """Return a copy with `change` applied to `starts` and `ends`."""
        return Documents(change(self.starts), None if self.ends is None else change(self.ends), self.longest)


def joined(batches: Sequence[Documents]) -> Documents:
    """Return the documents of several micro-batches, whose rows are concatenated. `ends` count from the start of each
    micro-batch."""
    import torch

    starts = torch.cat([each.starts for each in batches])
    known_ends = [each.ends for each in batches if each.ends is not None]
    if len(known_ends) < len(batches):
        return Documents(starts)
    most = max(ends.shape[1] for ends in known_ends)
    ends = torch.cat([torch.cat([e, e[:, -1:].expand(-1, most - e.shape[1])], 1) for e in known_ends])
    return Documents(starts, ends, max(each.longest for each in batches))
