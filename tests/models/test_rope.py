"""A model with rotary positions and QK norm: by the kernel, the same as by the reference."""

from typing import Any

import pytest
import torch
from models.conftest import TINY, randomized
from torch import Tensor

from gptlite.models.gpt.cache import LayerCache
from gptlite.models.gpt.config import GPTConfig, Norm, Position
from gptlite.models.gpt.model import GPT
from gptlite.models.layers import RMSNorm
from gptlite.ops.config import Attention
from gptlite.ops.select import Ops

pytestmark = pytest.mark.usefixtures("kernels")
MODERN = {"position": Position.rope, "norm": Norm.rms_norm, "qk_norm": True, "bias": False}
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"num_heads": 4, "kv_heads": 2},
    {"norm_gain": False},
    {"qk_norm": False},
    {"position": Position.learned},
)


def build(fused: bool, **overrides: Any) -> GPT:
    return randomized(GPT(GPTConfig(**TINY | MODERN | overrides), Ops(Attention.matmul, rope=fused), seed=3))


def of(model: GPT, batch: tuple[Tensor, ...]) -> list[Tensor]:
    """The loss, and the gradient of every parameter."""
    loss = model(*batch)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12)) for a, b in pairs)


@pytest.mark.parametrize("overrides", SHAPES, ids=str)
def test_the_model_is_the_same(batch, overrides):
    found, wanted = (of(build(fused, **overrides), batch) for fused in (True, False))
    assert distance(found, wanted) < 3e-6


@pytest.mark.parametrize("fp32_norms", [False, True])
def test_bf16_is_no_further_from_fp32(batch, fp32_norms):
    wanted, errors = of(build(False), batch), {}
    for fused in (False, True):
        model = build(fused)
        model.compute_dtype = torch.bfloat16
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module.fp32 = fp32_norms
        errors[fused] = distance(of(model, batch), wanted)
    assert errors[True] < 1.2 * errors[False]


def test_generation_with_a_cache(batch):
    """One position after the other, as the whole at once."""
    model, tokens = build(True), batch[0][:, :7]
    caches = [LayerCache(16) for _ in model.layers]
    for i in range(tokens.shape[1]):
        found = model.logits(tokens[:, i : i + 1], caches)
    torch.testing.assert_close(found, build(False).logits(tokens), rtol=1e-4, atol=1e-5)
