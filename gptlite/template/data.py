"""Points on two spirals, to be classified: replace this dataset with your own."""

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
    """Configuration of the dataset. Set a key on the command line with e.g. `data.noise=0.1`."""

    global_batch_size: int = 64
    samples: int = 4096
    noise: float = 0.05


class Spirals:
    """Map-style dataset of (point [2], index of its spiral), drawn with a seed."""

    def __init__(self, config: SpiralsConfig, seed: int, count: int) -> None:
        import torch  # here, since printing a configuration should not import torch

        draw = torch.Generator().manual_seed(seed)
        radius = torch.rand(count, 1, generator=draw)
        self.labels = torch.arange(count) % CLASSES
        angle = 2 * math.pi * (radius + self.labels[:, None] / CLASSES)
        points = radius * torch.cat([angle.cos(), angle.sin()], dim=1)
        self.points = points + config.noise * torch.randn(count, 2, generator=draw)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]


def open_spirals(config: SpiralsConfig) -> tuple[Spirals, Spirals]:
    """Return the training and the validation dataset."""
    return Spirals(config, 0, config.samples), Spirals(config, 1, 512)
