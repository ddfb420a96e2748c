"""Which implementation of each op runs."""

from dataclasses import dataclass
from enum import Enum


class Implementation(Enum):
    """`auto` takes the fastest path that runs here; asking for one that cannot run is an error."""

    auto = "auto"
    fused = "fused"
    reference = "reference"


class Attention(Enum):
    """`auto` picks by device; `sdpa` is torch's; `matmul` writes the scores out (any mask, attention dropout)."""

    auto = "auto"
    sdpa = "sdpa"
    matmul = "matmul"


@dataclass
class OpsConfig:
    """Implementation of the pointwise and loss ops, and of attention."""

    implementation: Implementation = Implementation.auto
    attention: Attention = Attention.auto
