"""Model inputs of a micro-batch besides its tokens or samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from gptlite.ops.documents import Documents


@dataclass(frozen=True)
class Inputs:
    """Targets int64 [B, S], where -100 is ignored, or of samples in their own shape, and optional inputs.

    `sample_ids` int64 [B]: global sample numbers for the dropout masks; None outside training. `documents`: document
    boundaries of whole sequences, if attention is restricted to documents. `upstream`: the gradient with respect to the
    sum of losses, if it is known in advance. `metrics`: `{name: sum over the micro-batch}`, filled by the loss with the
    metrics that the spec declares. `tokens`: those of the micro-batch, for a spec whose parts of a pipeline all take
    them.
    """

    targets: Tensor
    sample_ids: Tensor | None = None
    documents: Documents | None = None
    upstream: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    tokens: Tensor | None = None
