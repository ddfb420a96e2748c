"""What ranks do in test_spike_ranks.py: a run whose loss is not finite for one sample, and high for others."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from distributed.reshard_cases import joined
from gptlite.config import Config
from gptlite.models.gpt.model import GPT
from gptlite.pretrain import pretrain

BAD = 50  # its loss is not finite
HIGH = (192, 216)  # the loss of micro-batches of these samples is doubled


def train(config: Config, world: int, name: str) -> int | None:
    """On the first `world` ranks: the exit code of `pretrain`."""
    original = GPT.forward

    def forward(self: GPT, x: Tensor, targets: Tensor, sample_ids: Tensor | None = None, **more: Any) -> Tensor:
        out = original(self, x, targets, sample_ids, **more)
        if self.head is None or sample_ids is None or not torch.is_grad_enabled():
            return out
        high = ((sample_ids >= HIGH[0]) & (sample_ids < HIGH[1])).all()
        return out * (math.inf if (sample_ids == BAD).any() else 2.0 if high else 1.0)

    with joined(world, name) as is_in, patch.object(GPT, "forward", forward):
        return pretrain(config) if is_in else None
