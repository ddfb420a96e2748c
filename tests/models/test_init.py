"""Initial weights: GPT-2's distribution, and each a function of (seed, name, offset) alone."""

import hashlib
import math

import pytest
import torch

from gptlite.models.config import ModelConfig
from gptlite.models.gpt.config import GPTConfig
from gptlite.models.gpt.model import GPT
from gptlite.models.init import BLOCK, draw_normal_, init_weights
from gptlite.models.model import Model
from gptlite.models.spec import Constant, ModelSpec, Normal
from gptlite.ops.philox import philox

SHAPE = {"num_heads": 2, "d_model": 64, "vocab_size": 1000, "sequence_length": 128}


def weights(seed: int = 0, **overrides) -> dict[str, torch.Tensor]:
    config = GPTConfig(**SHAPE | {"num_layers": 2} | overrides)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)  # what is left out shows
    init_weights(Model.of(config), model, seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def drawn(size: int, name: str = "w", seed: int = 0) -> torch.Tensor:
    tensor = torch.empty(size)
    draw_normal_(tensor, 1.0, seed, name)
    return tensor


@pytest.fixture(scope="module")
def initial():
    return weights()


def test_initial_values_have_the_mean_and_deviation_of_gpt2(initial):
    for name, value in initial.items():
        if value.ndim == 1:
            assert torch.all(value == (1.0 if name.endswith("norm.weight") else 0.0)), name
            continue
        residual = name.endswith(("attn.proj.weight", "mlp.down.weight"))
        std = 0.02 / math.sqrt(2 * 2) if residual else 0.02
        count = value.numel()
        assert abs(float(value.std()) / std - 1) < 5 / math.sqrt(2 * count), name
        assert abs(float(value.mean())) < 5 * std / math.sqrt(count), name
        assert abs(float((value / std).pow(4).mean()) - 3) < 5 * math.sqrt(96 / count), name  # a normal's kurtosis


def test_init_std_scales_the_initial_weights():
    assert torch.equal(weights(init_std=0.04)["layers.0.mlp.up.weight"], 2 * weights()["layers.0.mlp.up.weight"])


def test_the_seed_decides(initial):
    again, other = weights(), weights(seed=1)
    for name, value in initial.items():
        assert torch.equal(value, again[name])
        assert value.ndim == 1 or not torch.equal(value, other[name])


def test_torchs_own_generator_is_neither_read_nor_moved(initial):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    draw_normal_(torch.empty(10), 1.0, 0, "w")
    assert torch.equal(torch.get_rng_state(), before)


def test_no_parameter_depends_on_another(initial):
    """More layers, more or fewer neighbours: what has the same name and shape has the same values."""
    others = weights(num_layers=5, tied_embeddings=False, bias=False)
    shared = [name for name in initial if name in others and not name.endswith(("proj.weight", "down.weight"))]
    assert "layers.1.attn.qkv.weight" in shared
    for name in shared:
        assert torch.equal(initial[name], others[name]), name
    scaled = others["layers.1.mlp.down.weight"] * math.sqrt(5 / 2)
    torch.testing.assert_close(scaled, initial["layers.1.mlp.down.weight"])


def test_parameters_of_one_shape_differ(initial):
    matrices = [value for name, value in initial.items() if name.endswith("qkv.weight")]
    assert not torch.equal(*matrices)
    correlation = torch.corrcoef(torch.stack([m.flatten() for m in matrices]))[0, 1]
    assert abs(correlation) < 5 / math.sqrt(matrices[0].numel())


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (1, 2), (5, 11), (BLOCK - 3, BLOCK + 6), (7, BLOCK + 30)])
def test_any_piece_is_drawn_as_within_the_whole(start: int, stop: int):
    piece = torch.empty(stop - start)
    draw_normal_(piece, 1.0, 0, "w", offset=start)
    assert torch.equal(piece, drawn(BLOCK + 77)[start:stop])


def test_offsets_past_32_bits():
    far = torch.empty(8)
    draw_normal_(far, 1.0, 0, "w", offset=2**34 - 4)
    near = drawn(4)
    assert not torch.equal(far[4:], near)  # the counter's upper word counts
    with pytest.raises(ValueError, match="offset=-1"):
        draw_normal_(far, 1.0, 0, "w", offset=-1)


def test_values_are_the_published_ones():
    """The first element by hand, from Philox's words and Box and Muller's formula."""
    digest = hashlib.sha256(b"0/w").digest()
    key = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
    zero = torch.zeros(1, dtype=torch.int64)
    u0, u1, u2, u3 = ((int(word) + 0.5) / 2**32 for word in philox((zero, zero, zero, zero), key))
    expected = [math.sqrt(-2 * math.log(u0)) * f(2 * math.pi * u1) for f in (math.cos, math.sin)]
    expected += [math.sqrt(-2 * math.log(u2)) * f(2 * math.pi * u3) for f in (math.cos, math.sin)]
    assert drawn(4).tolist() == pytest.approx(expected, rel=1e-6)


def test_blocks_are_independent():
    whole = drawn(2 * BLOCK + 77)
    first, second, third = whole.split(BLOCK)
    assert not torch.equal(first, second)
    assert not torch.equal(first[:77], third)
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1]
    assert abs(correlation) < 5 / math.sqrt(BLOCK)


def test_the_parameter_count_follows_the_formula(initial):
    assert (
        sum(each.numel() for each in initial.values()) == 1024 * 64 + 128 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64
    )


def test_a_model_without_a_rule_of_its_own_starts_by_fan_in():
    spec = ModelSpec[ModelConfig]()
    assert spec.initial(ModelConfig(), "0.weight", (8, 4)) == Normal(1 / 2)
    assert spec.initial(ModelConfig(), "filter.weight", (8, 4, 3, 3)) == Normal(1 / 6)
    assert spec.initial(ModelConfig(), "norm.weight", (8,)) == Constant(1.0)
    assert spec.initial(ModelConfig(), "norm.bias", (8,)) == Constant(0.0)
