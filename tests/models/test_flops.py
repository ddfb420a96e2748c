"""The FLOPs that MFU is computed from, against what torch counts while it runs them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.flops import flops_per_token, matmul_parameters, num_parameters
from gptlite.models.gpt.model import GPT
from gptlite.ops.config import Attention

LENGTH = 12


def counted(model, run) -> int:
    with FlopCounterMode(display=False) as counter:
        run(model)
    return counter.get_total_flops()


def forward_backward(model):
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    model(tokens, tokens).backward()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_against_torchs_counter(tiny, tied):
    """The counter sees the attention matmuls whole, masked half included, as one block of queries runs them.

    Those are two S x S matmuls forward and four backward, 12·L·d·S a token; the model's own arithmetic is half of it.
    """
    model = tiny(Attention.matmul, tied_embeddings=tied)  # torch 2.13 counts nothing for SDPA on a CPU
    config = model.config
    masked_half = 6 * config.num_layers * config.d_model * LENGTH
    per_token = counted(model, forward_backward) / (2 * LENGTH)
    assert per_token - masked_half == flops_per_token(config, LENGTH)


def test_the_forward_pass_is_a_third(tiny):
    model = tiny()
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    with torch.no_grad():
        forward = counted(model, lambda model: model(tokens, tokens))
    assert 3 * forward == counted(model, forward_backward)


def test_gpt3_175b():
    """Table D.1 of arXiv:2005.14165: 3.14e23 FLOPs for 300B tokens, at 6 a parameter and no attention."""
    config = GPTConfig(num_layers=96, num_heads=96, d_model=12288, vocab_size=50257, sequence_length=2048)
    assert 6 * matmul_parameters(config) * 300e9 == pytest.approx(3.14e23, rel=5e-3)
    attention = flops_per_token(config, 2048) - 6 * matmul_parameters(config)
    assert attention == 6 * 96 * 12288 * 2048


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_the_parameters_are_those_of_the_model(tied, bias):
    config = GPTConfig(vocab_size=1000, tied_embeddings=tied, bias=bias, d_ff=777)
    with torch.device("meta"):
        model = GPT(config)
    assert num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
