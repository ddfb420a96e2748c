"""FLOPs: the GPT's formula, and those of models that give none: counted by torch's, or refused by what has none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models.conftest import VALUES
from models.toy import ConvConfig, ConvSpec, config_of
from models.weights import matmul_parameters
from run_files import read_metrics
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gptlite.models.capabilities import Uncounted
from gptlite.models.flops import count_flops
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.flops import flops_per_token
from gptlite.models.gpt.model import GPT
from gptlite.models.model import Model
from gptlite.models.spec import ModelSpec
from gptlite.ops.config import Attention
from gptlite.ops.inputs import Inputs
from gptlite.ops.select import Ops
from gptlite.satellites.plan.parameters import num_parameters
from gptlite.start.pretrain import pretrain
from gptlite.trainer import banner

CONV = ConvConfig(channels=8, depth=2, kernel=3, symbols=11)
LENGTH = 16
# A multiply and an add a weight forward, twice that backward: of the convolutions and of the head.
CONV_FLOPS = 6 * (2 * 3 * 8 * 8 + 8 * 11)


@torch.library.custom_op("counted::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


@torch.library.custom_op("counted::square", mutates_args=())
def square(x: Tensor) -> Tensor:
    return x**2


cube.register_fake(torch.empty_like)  # the other has no way to run without data
for each, slope in ((cube, lambda x: 3 * x**2), (square, lambda x: 2 * x)):
    each.register_autograd(
        lambda ctx, grad, slope=slope: grad * slope(ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )


def changed(change: Callable[[Tensor], Tensor]) -> Model:
    """The toy with something done to what its blocks are given: activations [B, C, S]."""

    class Spec(ConvSpec):
        def forward(self, part: Any, x: Tensor, inputs: Inputs) -> Tensor:
            y = change(part.table(x).transpose(1, 2))
            part.table = None
            return super().forward(part, y, inputs)

    return Model(Spec(), CONV)


def test_the_toys_are_those_of_a_hand_formula():
    state = torch.get_rng_state()
    assert count_flops(Model.of(CONV), LENGTH) == CONV_FLOPS
    assert torch.equal(torch.get_rng_state(), state)  # a run's numbers do not depend on being counted


@pytest.mark.parametrize("length", [64, 128])
def test_the_gpts_are_its_formula_with_attention_whole(length):
    """Two S x S matmuls forward and four backward are 12·L·d·S a token; the model's own arithmetic is half of it."""
    config = GPTConfig(num_layers=3, num_heads=2, d_model=32, vocab_size=128, sequence_length=128, dropout=0.1)
    masked_half = 6 * config.num_layers * config.d_model * length
    assert count_flops(Model.of(config), length) == flops_per_token(config, length) + masked_half


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_on_a_cpu_the_heads_padding_counts_nothing(tiny, tied):
    model = tiny(Attention.matmul, tied_embeddings=tied)  # torch 2.13 counts nothing for SDPA on a CPU
    tokens = torch.zeros(2, 12, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    masked_half = 6 * model.config.num_layers * model.config.d_model * 12
    assert counter.get_total_flops() == (flops_per_token(model.config, 12) + masked_half) * tokens.numel()


def test_gpt3_175b():
    """Table D.1 of arXiv:2005.14165: 3.14e23 FLOPs for 300B tokens, at 6 a parameter and no attention."""
    config = GPTConfig(num_layers=96, num_heads=96, d_model=12288, vocab_size=50257, sequence_length=2048)
    assert 6 * matmul_parameters(config) * 300e9 == pytest.approx(3.14e23, rel=5e-3)
    attention = flops_per_token(config, 2048) - 6 * matmul_parameters(config)
    assert attention == 6 * 96 * 12288 * 2048


COUNTED = [{"tied_embeddings": tied, "bias": bias, "d_ff": 777} for tied in (True, False) for bias in (True, False)]
COUNTED += [{"num_layers": layers, **VALUES} for layers in (1, 5)]


@pytest.mark.parametrize("keys", [*COUNTED, COUNTED[-1] | {"kv_heads": 2}], ids=str)
def test_the_parameters_are_those_of_the_model(keys):
    config = GPTConfig(vocab_size=1000, **keys)
    with torch.device("meta"):
        model = GPT(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters(config) == count


def test_attention_of_torch_is_its_products():
    """Two of S x S forward, four backward."""
    attend = changed(lambda y: F.scaled_dot_product_attention(*3 * [y.transpose(1, 2)], is_causal=True).transpose(1, 2))
    assert count_flops(attend, LENGTH) == CONV_FLOPS + 12 * LENGTH * CONV.channels


NAMED = {
    "counted::cube": cube,
    "counted::square": square,
    "aten::_fft_r2c": lambda y: torch.fft.rfft(y, dim=1).real.repeat(1, 2, 1)[:, : y.shape[1]],
    "aten::grid_sampler_2d": lambda y: F.grid_sample(y[None], torch.zeros(1, *y.shape[1:], 2), align_corners=True)[0],
}


@pytest.mark.parametrize("name", NAMED)
def test_an_op_without_a_formula_is_named(name):
    with pytest.raises(Uncounted, match=f"^no FLOP formula for {name}; define `flops` in the spec$"):
        count_flops(changed(NAMED[name]), LENGTH)


def test_a_pass_that_needs_data_says_so():
    with pytest.raises(Uncounted, match=r"a pass on the meta device fails: .*item\(\).*; define `flops` in the spec"):
        count_flops(changed(lambda y: y * float(y.detach().sum())), LENGTH)


def test_what_costs_as_much_as_its_elements_is_nothing():
    def some(y: Tensor) -> Tensor:
        y = F.normalize(F.layer_norm(torch.lgamma(y.exp()), y.shape[-1:]), dim=1)
        return y.cumsum(2).softmax(1) + y.sort(1).values + F.dropout(F.interpolate(y, scale_factor=1.0), 0.5)

    assert count_flops(changed(some), LENGTH) == CONV_FLOPS


@pytest.mark.parametrize("peak", [1e12, None])
def test_a_run_of_it_has_its_mfu(tmp_path, monkeypatch, peak):
    monkeypatch.setattr(banner, "device_peak_flops", lambda *_: peak)
    if peak is None:  # nor is anything counted where there is nothing to compare it with
        monkeypatch.setattr(ModelSpec, "count_flops", lambda *_: pytest.fail("counted"))
    config = config_of(f"run.dir={tmp_path}", "trainer.max_steps=2")
    assert pretrain(config).exit_code == 0
    rows = [row for row in read_metrics(tmp_path) if "mfu" in row]
    assert rows
    per_token = 6 * (3 * 3 * 24 * 24 + 24 * 61)
    for row in rows:
        expected = None if peak is None else pytest.approx(row["tokens_per_second"] * per_token / peak)
        assert row["mfu"] == expected
    log = (tmp_path / "train.log").read_text()
    assert ("FLOP n/a" in " ".join(log.split())) == (peak is None)


def test_a_run_says_why_it_has_none(tmp_path, monkeypatch):
    def refuse(*_: object) -> int:
        raise Uncounted("no FLOP formula for counted::cube; define `flops` in the spec")

    monkeypatch.setattr(banner, "device_peak_flops", lambda *_: 1e12)
    monkeypatch.setattr(ModelSpec, "count_flops", refuse)
    assert pretrain(config_of(f"run.dir={tmp_path}", "trainer.max_steps=1")).exit_code == 0
    words = " ".join((tmp_path / "train.log").read_text().split())
    assert "MFU n/a: no FLOP formula for counted::cube; define `flops` in the spec" in words


def test_samples_are_counted_by_an_example():
    class Two(ModelSpec):
        name, schema, reads = "two", ConvConfig, "samples"

        def build(self, config: Any, ops: Ops, seed: int) -> nn.Module:
            return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))

    example = torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64)
    # Two products forward; backward two of the second layer, and of the first only its weight's.
    assert count_flops(Model(Two(), CONV), 1, example) == 2 * (2 * 8 * 16 + 3 * 16 * 3)
