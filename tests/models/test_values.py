"""Value residuals: the formula, which layers have them, stages."""

import pytest
import torch
from models.conftest import VALUES
from models.test_gpt import check

from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.model import GPT
from gptlite.models.gpt.spec import GPTSpec
from gptlite.models.gpt.values import parted, with_values
from gptlite.ops.config import Attention

pytestmark = pytest.mark.usefixtures("kernels")
CHOICES = [Attention.matmul, Attention.sdpa, Attention.fused]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.value)
def test_values_and_gradients_are_those_of_the_formula(tiny, batch, choice):
    check(tiny(choice, num_layers=4, **VALUES), batch, tolerance=2e-5)


def test_which_layers_mix():
    config = GPTConfig(num_layers=7, vocab_size=64, value_residual=True)
    shapes = {name: tuple(p.shape) for name, p in GPT(config).named_parameters() if ".values." in name}
    assert shapes == {f"layers.{layer}.attn.values.weight": (2,) for layer in range(1, 7)}


@pytest.mark.parametrize("slices", [1, 2])
def test_a_stage_receives_what_was_sent(slices):
    x, v = torch.randn(3, 8 // slices, 10), torch.randn(3, 8, 2, 1, 4)  # 2 of 4 heads, of width 4
    sent = with_values(x, v, 16)
    assert sent.shape == (3, 8 // slices, 10 + 16)
    received = parted(sent, 16, 2, 4, slices)
    assert torch.equal(received[0], x)
    assert torch.equal(received[1], v)


def test_ranks_cannot_share_heads_of_mixed_values():
    plain, mixed = (GPTConfig(num_heads=8, kv_heads=2, value_residual=residual) for residual in (False, True))
    assert GPTSpec().tensor_sizes(plain)["model.num_heads"] == 8
    assert GPTSpec().tensor_sizes(mixed)["model.kv_heads"] == 2
