"""Codecs of blocks."""

import numpy as np
import pytest
import torch
from torch import Tensor

from compressed.simulation import rounded
from gptlite.satellites.compressed.codecs import CODECS, Codec, codec_of

BLOCKS = 6


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> Codec:
    return CODECS[request.param]


def sample(codec: Codec, blocks: int = BLOCKS) -> Tensor:
    """Blocks of sizes that differ."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.arange(blocks).remainder(7).sub(3).view(-1, 1)
    return torch.randn(blocks, codec.width, generator=generator) * sizes


def through(codec: Codec, x: Tensor, mask: Tensor | None = None) -> Tensor:
    message = codec.encode(x, mask)
    assert message.dtype == torch.uint8
    assert message.shape == (codec.message_bytes(len(x)),)
    return codec.decode(message, len(x), mask)


@pytest.mark.parametrize("blocks", [0, 1, BLOCKS])
def test_values_are_those_of_float64(codec: Codec, blocks: int):
    x = sample(codec, blocks)
    mask = torch.arange(codec.width).remainder(5).ne(0).expand_as(x)
    x = torch.where(mask, x, 0.0)
    expected = rounded(codec.name, x.double().numpy(), mask.numpy()) if blocks else np.empty((0, codec.width))
    # Next to the middle of two codes the quotient in fp32 may be on its other side; these values have no such ones.
    torch.testing.assert_close(through(codec, x, mask).double(), torch.from_numpy(expected), rtol=3e-6, atol=0)


def test_the_extreme_code_and_halves_to_even():
    """Of scale 1, int8 is the integer next to a value, and the even one of two."""
    x = torch.zeros(1, 256)
    x[0, :8] = torch.tensor([127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5])
    assert through(CODECS["int8"], x)[0, :9].tolist() == [127, -127, 0, 2, 2, 0, -2, 126, 0]
    x[0, :8] = torch.tensor([7.0, -7.0, 0.5, 1.5, 2.5, -0.5, -1.5, 6.5])
    assert through(CODECS["int4"], x)[0, :9].tolist() == [7, -7, 0, 2, 2, 0, -2, 6, 0]


def test_zeros_become_zeros(codec: Codec):
    x = sample(codec)
    x[1] = 0
    x[2, ::3] = 0
    decoded = through(codec, x, x != 0)
    assert (decoded[x == 0] == 0).all()
    assert (decoded[1] == 0).all()
    assert (through(codec, torch.zeros_like(x)) == 0).all()  # without a mask too


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("masked", [False, True])
def test_what_is_not_finite_is_not_hidden(codec: Codec, value: float, masked: bool):
    x = sample(codec)
    mask = torch.ones_like(x, dtype=torch.bool) if masked else None
    if mask is not None:
        mask[2, :9] = False
    x[2, 5] = value  # which the mask says is zero
    decoded = through(codec, x, mask)
    assert not decoded[2, 5].isfinite()
    if codec.name != "bf16":
        assert decoded[2].isnan().all()
    assert decoded[[0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("size", [1e-45, 1.4e-44, 2.6e-43, 3e-41, 1e-38, 3e35])
def test_the_smallest_and_the_largest_values_keep_their_sign_or_vanish(codec: Codec, size: float):
    """A code is in its range even where the scale is rounded to one of a few subnormal numbers."""
    x = torch.linspace(-1, 1, codec.width).mul(size).expand(2, -1).contiguous()
    decoded = through(codec, x)
    assert decoded.isfinite().all()
    assert (decoded * x.sign() >= 0).all()
    assert decoded.abs().max() <= size * 1.01


def test_codes_of_a_block_depend_on_nothing_else(codec: Codec):
    x = sample(codec)
    for block in range(BLOCKS):
        assert torch.equal(through(codec, x)[block], through(codec, x[block : block + 1])[0])


def test_the_mean_of_absolute_values_contracts_heavy_tails_where_the_paper_scale_expands():
    codec = CODECS["sign"]
    x = torch.zeros(1, codec.width)
    x[0, 0], x[0, 1] = 1.0, -0.5
    error = (x - through(codec, x)).square().sum() / x.square().sum()
    assert error == pytest.approx(1 - 1.5**2 / codec.width / 1.25, abs=1e-6)
    paper = x.norm() / codec.width**0.5 * torch.where(x < 0, -1.0, 1.0)
    assert (x - paper).square().sum() > 1.8 * x.square().sum()


@pytest.mark.parametrize(("name", "bits"), [("bf16", 16), ("int8", 8.125), ("int4", 4.125), ("sign", 1.03125)])
def test_bits_of_a_value(name: str, bits: float):
    assert CODECS[name].message_bytes(10) * 8 == bits * 10 * CODECS[name].width


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("masked", [False, True])
def test_kernels_give_the_same_bits(codec: Codec, masked: bool):
    x = sample(codec)
    mask = torch.arange(codec.width).remainder(3).ne(0).expand_as(x) if masked else None
    x = x if mask is None else torch.where(mask, x, 0.0)
    fused = codec_of(codec.name, fused=True)
    assert torch.equal(fused.encode(x, mask), codec.encode(x, mask))
    assert torch.equal(through(fused, x, mask), through(codec, x, mask))
    assert fused.message_bytes(3) == codec.message_bytes(3)
