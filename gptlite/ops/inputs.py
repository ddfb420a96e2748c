"""Inputs of the model for a micro-batch, besides its tokens or samples: targets, and the boundaries of documents in
packed sequences, which the data loader computes on the host for the model's attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


IGNORE = -100  # target without a loss; torch's default ignore_index


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


@dataclass(frozen=True)
class Inputs:
    """Targets and optional inputs of a micro-batch.

    `targets`: int64 [B, S], where IGNORE has no loss, or the targets of samples in their own shape. `sample_ids` int64
    [B]: global sample numbers for the dropout masks; None outside training. `documents`: document boundaries of whole
    sequences, if attention is restricted to documents. `upstream`: the gradient with respect to the sum of losses, if
    it is known in advance. `metrics`: `{name: sum over the micro-batch}`, filled by the loss with the metrics that the
    spec declares.
    """

    targets: Tensor
    sample_ids: Tensor | None = None
    documents: Documents | None = None
    upstream: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


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
