"""Initial weights that do not depend on the layout: each is drawn from (seed, global name, global offset).

A parameter is drawn in blocks of BLOCK elements of its flattened global tensor, each block from a generator of its
own, so that any shard can draw its part and get the bits the whole would have had (within one device type).
"""

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gptlite.model.config import GPTConfig

BLOCK = 2**20
RESIDUAL_PROJECTIONS = ("attn.proj.weight", "mlp.down.weight")


def init_weights(model: nn.Module, config: GPTConfig, seed: int) -> None:
    """GPT-2's initialisation: N(0, init_std), residual projections by 1/sqrt(2 * layers) less, biases 0, norms 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                scale = 1 / math.sqrt(2 * config.num_layers) if name.endswith(RESIDUAL_PROJECTIONS) else 1.0
                draw_normal_(parameter, config.init_std * scale, seed, name)


def draw_normal_(parameter: Tensor, std: float, seed: int, name: str) -> None:
    """Fills a contiguous fp32 parameter with N(0, std) from (seed, name)."""
    flat = parameter.view(-1)
    for index, block in enumerate(flat.split(BLOCK)):
        # A whole block is always drawn: short draws take another path in torch's CPU generator.
        block.copy_(_block(seed, name, index, parameter.device)[: len(block)] * std)


def _block(seed: int, name: str, index: int, device: torch.device) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}/{index}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(BLOCK, generator=generator, device=device)


def parameter_count(parameters: Iterable[Tensor]) -> int:
    """Number of elements."""
    return sum(p.numel() for p in parameters)
