"""A multilayer perceptron: replace its configuration and `build` by those of your model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptlite.models.config import ModelConfig
from gptlite.models.spec import ModelSpec
from gptlite.template.data import CLASSES

if TYPE_CHECKING:
    from torch import nn

    from gptlite.ops.select import Ops


@dataclass
class MLPConfig(ModelConfig):
    """Keys of the model: `model.width=128` on the command line."""

    name: str = "template"
    peak_lr: float = 0.003
    width: int = 64
    depth: int = 3


class MLPSpec(ModelSpec[MLPConfig]):
    """The model as gptlite trains it. docs/add_a_model.md lists the methods that can be added."""

    name = "template"  # the preset: model=template
    schema = MLPConfig
    reads = "samples"
    metrics = ("accuracy",)
    positive = ("width", "depth")

    def build(self, config: MLPConfig, ops: Ops, seed: int) -> nn.Module:
        """Return the module. The children of an nn.Sequential are units of ZeRO and pipeline stages."""
        from torch import nn  # only here, as printing a configuration should not import torch

        width = config.width
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(config.depth)]
        return nn.Sequential(nn.Linear(2, width), *layers, nn.Linear(width, CLASSES))
