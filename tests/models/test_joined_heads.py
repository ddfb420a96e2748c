"""Attention whose kernel writes the gradient of packed queries, keys and values and sums the bias's, as on a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from dispatched import Dispatched
from models.conftest import build, differentiated, distances

from gptlite.models.gpt.config import Position
from gptlite.models.gpt.model import GPT
from gptlite.ops.config import Attention
from gptlite.ops.select import Ops

pytestmark = pytest.mark.usefixtures("kernels")
SDPA = Ops(Attention.sdpa, dropout=True)


def joined(joins: bool, **overrides: Any) -> GPT:
    return build(ops=replace(SDPA, fused_scores=joins), **overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        *({}, {"dropout": 0.2}, {"bias": False}, {"kv_heads": 1}, {"qk_norm": True}, {"value_residual": True}),
        {"position": Position.rope},
    ],
    ids=str,
)
def test_the_model_is_the_same(batch, overrides):
    found, wanted = (differentiated(joined(joins, **overrides), batch) for joins in (True, False))
    assert max(distances(found, wanted)) < 2e-6


def test_a_step_has_no_sum_of_the_bias_beside_the_kernel(batch):
    """Nor one of a bias that changes before attention, which linear layers sum themselves."""
    for overrides, sums in (({}, 0), ({"position": Position.rope}, 2)):
        model = joined(True, **overrides)
        with Dispatched() as dispatched:
            differentiated(model, batch)
        assert dispatched.ops["join_heads"] == model.config.num_layers == 2
        with Dispatched() as before:
            differentiated(joined(False, **overrides), batch)
        assert before.ops["sum"] - dispatched.ops["sum"] == 2 - sums
        assert before.ops["cat"] - dispatched.ops["cat"] == 2


def test_a_model_of_16_bits_has_a_bias_gradient_of_its_parameters_dtype(batch):
    model = joined(True)
    model.compute_dtype = torch.bfloat16
    found, wanted = differentiated(model, batch), differentiated(build(ops=Ops()), batch)
    assert all(each.dtype == torch.float32 for each in found)
    assert max(distances(found, wanted)) < 5e-2
