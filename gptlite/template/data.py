"""Points on two spirals, to be told apart: replace them by your data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptlite.data.config import DatasetConfig

if TYPE_CHECKING:
    from torch import Tensor

CLASSES = 2


@dataclass
class SpiralsConfig(DatasetConfig):
    """Keys of the dataset: `data.noise=0.1` on the command line."""

    global_batch_size: int = 64
    samples: int = 4096
    noise: float = 0.05


class Spirals:
    """Map-style dataset of (point [2], number of its spiral); each sample is a function of its index."""

    def __init__(self, config: SpiralsConfig, first: int, count: int) -> None:
        self.config, self.first, self.count = config, first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        import torch

        draw = torch.Generator().manual_seed(self.first + index)
        label, radius = index % CLASSES, float(torch.rand((), generator=draw))
        angle = 2 * math.pi * (radius + label / CLASSES)
        point = radius * torch.tensor([math.cos(angle), math.sin(angle)])
        return point + self.config.noise * torch.randn(2, generator=draw), label


def open_spirals(config: SpiralsConfig) -> tuple[Spirals, Spirals]:
    """Return the training and the validation samples, which have no point in common."""
    return Spirals(config, 0, config.samples), Spirals(config, config.samples, 512)
