"""A plugin that is right but for the fault that `model.fault` or `data.fault` names."""

import os
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import default_collate

from gptlite.data.config import DatasetConfig
from gptlite.data.registry import register_data
from gptlite.models.config import ModelConfig
from gptlite.models.registry import register_model
from gptlite.models.spec import ModelSpec


@dataclass
class WrongConfig(ModelConfig):
    peak_lr: float = 0.01
    fault: str = ""


class Mute(Exception):
    """An exception whose own code cannot print it."""

    def __str__(self) -> str:
        raise KeyError("no message")


class Fork(nn.Module):
    """Two outputs."""

    def forward(self, x):
        return x, x


class WrongSpec(ModelSpec):
    name, schema, reads = "wrong", WrongConfig, "samples"

    def build(self, config, ops, seed):
        if config.fault == "build":
            raise KeyError("no such layer")
        if config.fault == "mute":
            raise Mute
        last = {"image": nn.Unflatten(1, (2, 4)), "pair": Fork()}.get(config.fault, nn.Linear(8, 3))
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(9 if config.fault == "width" else 8, 8), last)

    def activations(self, config, batch, length):
        return (batch, 9) if config.fault == "shape" else None


class Rows:
    """Rows of 8 numbers and one of 3 classes."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 0 if self.fault == "empty" else 64

    def __getitem__(self, index: int):
        rank = os.environ.get("RANK", "0")
        if index and (self.fault == "raises" or self.fault == f"rank{rank}"):
            raise OSError("the disk is gone")
        if index and self.fault in ("mute", f"mute{rank}"):
            raise Mute
        if index and self.fault == "exits":
            os._exit(3)
        if self.fault == "text":
            return "a row", 0
        x = torch.full((8,), float("nan") if self.fault == "nan" else index / 64)
        return x, torch.tensor(7 if index and self.fault == "class" else index % 3)

    def collate(self, samples):
        if self.fault == "collate" and len(samples) > 1:
            raise IndexError("two are too many")
        return default_collate(samples)


@dataclass
class RowsConfig(DatasetConfig):
    fault: str = ""


def open_rows(config: RowsConfig):
    return Rows(config.fault), Rows("")


register_model(WrongSpec())
register_data("rows", RowsConfig, open_rows)
