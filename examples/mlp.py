"""Multilayer perceptron on random images with FashionMNIST's shape: plugins=[examples.mlp] model=mlp data=clothes."""

from dataclasses import dataclass

from gptlite.data.config import DatasetConfig
from gptlite.data.registry import register_data
from gptlite.models.config import ModelConfig
from gptlite.models.registry import register_model
from gptlite.models.spec import ModelSpec


@dataclass
class MLPConfig(ModelConfig):  # noqa: D101
    peak_lr: float = 0.001
    width: int = 128


class MLPSpec(ModelSpec):  # noqa: D101
    name, schema, reads, metrics = "mlp", MLPConfig, "samples", ("accuracy",)

    def build(self, config, ops, seed):
        from torch.nn import Flatten, Linear, ReLU, Sequential

        return Sequential(Flatten(), Linear(784, config.width), ReLU(), Linear(config.width, 10))


class ClothesConfig(DatasetConfig):  # noqa: D101
    pass


def open_clothes(config):  # noqa: D103
    from torch import Generator, arange, randn, utils

    draw = Generator().manual_seed(0)
    images = randn(10, 1, 28, 28, generator=draw).repeat(400, 1, 1, 1) + randn(4000, 1, 28, 28, generator=draw)
    return utils.data.random_split(utils.data.TensorDataset(images, arange(4000) % 10), [0.9, 0.1], draw)


register_model(MLPSpec())
register_data("clothes", ClothesConfig, open_clothes)
