"""Perceptrons of several forms that classify points, with nothing written for parallelism or the planner."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gptlite.data.config import DatasetConfig
from gptlite.data.registry import register_data
from gptlite.models.config import ModelConfig
from gptlite.models.registry import register_model
from gptlite.models.spec import ModelSpec
from gptlite.ops.select import Ops

INPUTS, CLASSES = 48, 10


@dataclass
class PerceptronConfig(ModelConfig):
    """`form`: a sequential, a module with a list of layers, or one without blocks."""

    peak_lr: float = 0.001
    width: int = 96
    form: str = "sequential"


class Listed(nn.Module):
    """Layers in a list, between two layers outside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(INPUTS, width), nn.Linear(width, CLASSES)
        self.layers = nn.ModuleList(
            [nn.Linear(width, 3 * width), nn.Linear(3 * width, 2 * width), nn.Linear(2 * width, width)]
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.into(x)
        for layer in self.layers:
            y = layer(y).relu()
        return self.out(y)


class Whole(nn.Module):
    """Two layers and no list."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(INPUTS, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.into(x)))


class PerceptronSpec(ModelSpec[PerceptronConfig]):
    """The defaults of ModelSpec."""

    name, schema, reads = "perceptron", PerceptronConfig, "samples"
    metrics = ("accuracy",)

    def build(self, config: PerceptronConfig, ops: Ops, seed: int) -> nn.Module:
        width = config.width
        if config.form != "sequential":
            return Listed(width) if config.form == "listed" else Whole(width)
        layers = [nn.Linear(INPUTS, 4 * width), nn.ReLU(), nn.Linear(4 * width, 2 * width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(2 * width, width), nn.Tanh(), nn.Linear(width, CLASSES))


@dataclass
class PointsConfig(DatasetConfig):
    """Random points."""

    samples: int = 512


class Points:
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(count, INPUTS, generator=generator), torch.arange(count) % CLASSES

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


register_model(PerceptronSpec())
register_data("random_points", PointsConfig, lambda config: (Points(config.samples), Points(config.samples // 8)))
