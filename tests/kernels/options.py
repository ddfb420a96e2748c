"""What the kernels' tests give an op besides tensors, and the state that AdamW's steps change."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptlite.ops.dropout import DropoutKey, keep_mask
from kernels.library import GptliteLoss


@dataclass(frozen=True)
class Dropout:
    """A mask's name, and its chance."""

    p: float
    sample_ids: tuple[int, ...]
    seed: int = 4_000_000_007  # above 2^31
    site: int = 5
    first_position: int = 0
    first_head: int = 0

    @property
    def scale(self) -> float:
        return 1 / (1 - self.p)

    def keep(self, shape: Sequence[int]) -> Tensor:
        """What gptlite/ops/dropout.py keeps."""
        ids = torch.tensor(self.sample_ids, dtype=torch.int64)
        key = DropoutKey(self.seed, self.site, ids, self.first_position, self.first_head)
        return keep_mask(torch.Size(shape), self.p, key)


@dataclass(frozen=True)
class Loss:
    """Options of the cross entropy; `first` where columns are cut."""

    ignore_index: int = -100
    z_loss: float = 0.0
    scale: float = 1.0  # of the gradient
    first: int = 0

    @property
    def struct(self) -> GptliteLoss:
        return GptliteLoss(self.ignore_index, self.first, self.z_loss, self.scale)


@dataclass(frozen=True)
class Adam:
    """Options of AdamW."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    adam: bool = False


@dataclass
class State:
    """One parameter with its moments and its count of steps, fp32."""

    parameter: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    copy: Tensor | None = None  # of the parameter, in 16 bits
