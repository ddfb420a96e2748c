"""What a model is given of a micro-batch beside its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from gptlite.ops.documents import Documents


@dataclass(frozen=True)
class Inputs:
    """Targets int64 [B, S], where -100 counts nothing, and what a model may use of the rest.

    `sample_ids` int64 [B]: the global sample numbers that dropout is drawn from; none outside training. `documents`:
    those of whole sequences, where attention keeps to them. `upstream`: the gradient that the sum of losses will get,
    where it is known.
    """

    targets: Tensor
    sample_ids: Tensor | None = None
    documents: Documents | None = None
    upstream: float | None = None
