"""Layers of a ResNet."""

import torch.nn.functional as F
from torch import Tensor, nn


def norm_of(kind: str, channels: int) -> nn.Module:
    """Return a norm of `channels` channels: `batch`, or `group` with at least 16 channels per group."""
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(max(1, min(32, channels // 16)), channels)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a skip connection, which has a 1x1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = norm_of(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = norm_of(norm, outputs)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm_of(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for x [B, C, H, W]."""
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.skip(x))
