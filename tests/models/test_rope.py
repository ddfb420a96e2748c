"""A model with rotary positions and QK norm: by the kernel, the same as by the reference."""

from typing import Any

import pytest
import torch
from models.conftest import build, differentiated, distances

from gptlite.models.gpt.config import Norm, Position
from gptlite.models.gpt.model import GPT
from gptlite.models.layers import RMSNorm
from gptlite.ops.select import Ops

pytestmark = pytest.mark.usefixtures("kernels")
ROTARY = {"position": Position.rope, "norm": Norm.rms_norm, "qk_norm": True, "bias": False}
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"num_heads": 4, "kv_heads": 2},
    {"norm_gain": False},
    {"qk_norm": False},
    {"position": Position.learned},
)


def rotated(fused: bool, **overrides: Any) -> GPT:
    return build(ops=Ops(rope=fused), **ROTARY | overrides)


@pytest.mark.parametrize("overrides", SHAPES, ids=str)
def test_the_model_is_the_same(batch, overrides):
    found, wanted = (differentiated(rotated(fused, **overrides), batch) for fused in (True, False))
    assert max(distances(found, wanted)) < 3e-6


@pytest.mark.parametrize("fp32_norms", [False, True])
def test_bf16_is_no_further_from_fp32(batch, fp32_norms):
    wanted, errors = differentiated(rotated(False), batch), {}
    for fused in (False, True):
        model = rotated(fused)
        model.compute_dtype = torch.bfloat16
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module.fp32 = fp32_norms
        errors[fused] = max(distances(differentiated(model, batch), wanted))
    assert errors[True] < 1.2 * errors[False]
