"""A plug-in whose block 2 has the wrong collective, or the state, that `model.fault` names; right without one."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from gptlite.data.config import DatasetConfig
from gptlite.data.registry import register_data
from gptlite.models.config import ModelConfig
from gptlite.models.layers import Linear
from gptlite.models.registry import register_model
from gptlite.models.spec import Cut, ModelSpec

CLASSES = 3


@dataclass
class OwnConfig(ModelConfig):
    peak_lr: float = 0.01
    width: int = 32
    depth: int = 6
    fault: str = ""


class SummedBack(torch.autograd.Function):
    """The identity, whose gradient is summed over ranks that have the whole of it already."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Block(nn.Module):
    def __init__(self, width: int, fault: str) -> None:
        super().__init__()
        self.fault, self.tensor_axis, self.calls = fault, None, 0
        self.up, self.down = (
            Linear(*sizes, bias=True, fused=False) for sizes in ((width, 4 * width), (4 * width, width))
        )

    def forward(self, x):
        out = self.down(F.gelu(self.up(x)))
        if self.tensor_axis is not None and self.fault == "forward":
            dist.all_reduce(out.data, group=self.tensor_axis.group)  # `down` has summed it
        if self.tensor_axis is not None and self.fault == "backward":
            out = SummedBack.apply(out, self.tensor_axis.group)
        if self.fault == "data":
            out = out * (1 + out.mean(0))  # of the samples of this rank alone
        if self.fault == "counter":  # in no checkpoint
            self.calls += 1
            out = out * (1 + 0.01 * self.calls)
        return x + out


class OwnSpec(ModelSpec):
    name, schema, reads = "own", OwnConfig, "samples"
    casts = True

    def build(self, config, ops, seed):
        faults = [config.fault if number == 2 else "" for number in range(1, config.depth + 1)]
        return nn.Sequential(
            nn.Linear(8, config.width),
            *(Block(config.width, each) for each in faults),
            nn.Linear(config.width, CLASSES),
        )

    def tensor_sizes(self, config):
        return {"4 x model.width": 4 * config.width}

    def cuts(self, config):
        return {"*.up": Cut.column, "*.down": Cut.row}


@dataclass
class PointsConfig(DatasetConfig):
    global_batch_size: int = 16


class Points:
    """Points of 8 numbers, and the class of each."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.points = torch.randn(256, 8, generator=draw)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int):
        return self.points[index], torch.tensor(index % CLASSES)


register_model(OwnSpec())
register_data("classes", PointsConfig, lambda config: (Points(0), Points(1)))
