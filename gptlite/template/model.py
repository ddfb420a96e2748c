"""A multilayer perceptron: replace its configuration and `build` with those of your model."""

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
    """Configuration of the model. Set a key on the command line with e.g. `model.width=128`."""

    name: str = "template"
    peak_lr: float = 0.003
    width: int = 64
    depth: int = 3


class MLPSpec(ModelSpec[MLPConfig]):
    """Interface between the model and gptlite. docs/add_a_model.md lists the methods that can be added."""

    name = "template"  # also the name of the preset: model=template
    schema = MLPConfig
    reads = "samples"
    metrics = ("accuracy",)
    positive = ("width", "depth")

    def build(self, config: MLPConfig, ops: Ops, seed: int) -> nn.Module:
        """Return the module. The children of an nn.Sequential are the units of ZeRO and of pipeline stages."""
        from torch import nn  # here, since printing a configuration should not import torch

        width = config.width
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(config.depth)]
        return nn.Sequential(nn.Linear(2, width), *layers, nn.Linear(width, CLASSES))
