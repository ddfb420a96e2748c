"""Inputs of the model for a micro-batch, besides its tokens or samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from gptlite.ops.documents import Documents


IGNORE = -100  # target without a loss; torch's default ignore_index


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
