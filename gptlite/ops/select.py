"""Which implementation of each op a model uses, decided once and said in the banner."""

from dataclasses import dataclass

import torch

from gptlite.errors import ConfigError
from gptlite.ops.attention import select_attention
from gptlite.ops.config import Attention, Implementation, OpsConfig


@dataclass(frozen=True)
class Ops:
    """The chosen path of each op, with the reason."""

    attention: Attention = Attention.matmul
    reasons: tuple[str, ...] = ()


def select_ops(config: OpsConfig, device: torch.device) -> Ops:
    """The ops that run on a device. Raises ConfigError where a path asked for cannot run."""
    if config.implementation is Implementation.fused:
        raise ConfigError("ops=fused: this version has no fused kernels yet; use ops=auto or ops=reference")
    attention, why = select_attention(config.attention, device)
    return Ops(attention, (f"attention {attention.value} ({why})", "others reference"))
