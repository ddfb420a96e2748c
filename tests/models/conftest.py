"""A GPT small enough to check by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.model import GPT
from gptlite.ops.config import Attention
from gptlite.ops.cross_entropy import IGNORE
from gptlite.ops.select import Ops

TINY = {
    "num_layers": 2,
    "num_heads": 3,
    "d_model": 24,
    "d_ff": 40,
    "vocab_size": 53,
    "vocab_multiple": 16,
    "sequence_length": 16,
}


def randomized(model: GPT) -> GPT:
    """With every parameter, biases and norms too, far from its initial value."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(mean + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture
def tiny() -> Callable[..., GPT]:
    """Builds a randomized GPT."""

    def build(attention: Attention = Attention.matmul, **overrides: Any) -> GPT:
        return randomized(GPT(GPTConfig(**TINY | overrides), Ops(attention), seed=3))

    return build


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens, targets (a few of them ignored) [4, 13] and the sample numbers."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(TINY["vocab_size"], (4, 14), generator=generator)
    tokens, targets = text[:, :-1], text[:, 1:].clone()
    targets[0, 9:] = IGNORE
    return tokens, targets, torch.tensor([7, 3, 2**33, 0])
