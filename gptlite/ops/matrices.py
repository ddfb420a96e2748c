"""Matrix structure of a model's parameters, for optimizers that update whole matrices."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Matrices:
    """Matrix structure of the parameters, for Muon.

    `edges`: name suffixes of matrices that AdamW updates instead (embeddings, the head). `fused`: `{name suffix:
    (number of groups, relative rows of each matrix in a group)}` of parameters that consist of several matrices.
    `batched`: name suffixes of parameters [E, rows, columns] with one matrix per expert. `embeddings`: names of
    embeddings found by the type of their module, which AdamW updates unless `optimizer.adamw_names` is null.
    """

    edges: tuple[str, ...] = ()
    fused: Mapping[str, tuple[int, tuple[int, ...]]] | None = None
    batched: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
