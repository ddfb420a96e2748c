"""Models with parameters without dims: a perceptron by the defaults of ModelSpec, and a GPT."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from models.mlp import CLASSES, INPUTS
from torch import Tensor, nn

from gptlite.models.config import ModelConfig
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.mlp import MLP
from gptlite.models.gpt.spec import GPTSpec
from gptlite.models.registry import register_model
from gptlite.models.spec import Constant, ModelSpec, Normal
from gptlite.ops.select import Ops


@dataclass
class ScaledConfig(ModelConfig):
    peak_lr: float = 0.01
    width: int = 24


class Scaled(nn.Module):
    """exp(scale) times the output of a layer, whose input is shifted."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.scale, self.shift = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.shift) * self.scale.exp()


class ScaledSpec(ModelSpec[ScaledConfig]):
    name, schema, reads = "scaled", ScaledConfig, "samples"

    def build(self, config: ScaledConfig, ops: Ops, seed: int) -> nn.Module:
        sizes = [INPUTS, config.width, config.width, CLASSES]
        layers = [nn.Linear(before, after) for before, after in pairwise(sizes)]
        return nn.Sequential(Scaled(layers[0]), nn.Tanh(), Scaled(layers[1]), Scaled(layers[2]))


class GainedMLP(MLP):
    """An MLP whose input is multiplied by a gain: under sequence parallelism each rank has a part of its gradient."""

    gain: nn.Parameter

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return super().forward(x * self.gain, **options)


@dataclass
class GainedConfig(GPTConfig):
    pass


class GainedSpec(GPTSpec):
    name: ClassVar[str] = "gained"
    schema = GainedConfig

    def build(self, config: GPTConfig, ops: Ops, seed: int) -> Any:
        model = super().build(config, ops, seed)
        for block in model.blocks():
            block.mlp.__class__ = GainedMLP  # pyright: ignore[reportAttributeAccessIssue]
            block.mlp.gain = nn.Parameter(torch.ones(()))
        return model

    def initial(self, config: GPTConfig, name: str, shape: tuple[int, ...]) -> Normal | Constant:
        return super().initial(config, name, shape) if shape else Constant(1.0)


register_model(ScaledSpec())
register_model(GainedSpec())
