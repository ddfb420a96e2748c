"""Sampling parameters of text generation. Does not import torch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """Parameters for sampling the next token. Temperature 0 selects the most likely token; `top_k` 0 and `top_p` 1 turn
    these limits off."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be finite and at least 0 (0: most likely token)")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must be at least 0 and below 2**63")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must not be negative; 0 keeps all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
