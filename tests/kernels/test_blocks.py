"""Blockwise quantization, bit for bit that of gptlite/satellites/compressed/codecs.py."""

import pytest
import torch
from torch import Tensor

from gptlite.satellites.compressed.codecs import CODECS, Quantized
from kernels.backends import Backend
from kernels.cases import KINDS, each, generator, on, rows_of, same_bits
from kernels.loop import loop_over

QUANTIZED = {codec.name: codec for codec in CODECS.values() if isinstance(codec, Quantized)}
MASKED = [("int8", False), ("int4", False), ("sign", False), ("sign", True)]


def mask_of(codec: Quantized, x: Tensor) -> Tensor:
    """The first block has no values, the second has one, the last has all."""
    mask = torch.rand(x.shape, generator=generator(codec.name, *x.shape)) < 0.7
    mask[:1] = False
    mask[1:2, 3:] = False
    mask[-1:] = True
    return mask


def check_blocks(backend: Backend, codec: Quantized, x: Tensor, mask: Tensor | None) -> None:
    message = codec.encode(x, mask)
    assert same_bits(backend.quantize_blocks(x, codec.bits, mask), message)
    decoded = backend.dequantize_blocks(message, len(x), codec.bits, mask)
    expected = codec.decode(message, len(x), mask)
    assert same_bits(torch.nan_to_num(decoded), torch.nan_to_num(expected))
    assert torch.equal(decoded.isnan(), expected.isnan())


def tried(codec: Quantized, x: Tensor, masked: bool) -> tuple[Tensor, Tensor | None]:
    mask = mask_of(codec, x) if masked else None
    return (x if mask is None else torch.where(mask, x, 0.0)), mask


@each("blocks", (1, 2, 3, 4, 5, 33, 150, 1000), (1, 6))
@loop_over("name,masked", MASKED)
def test_numbers_of_blocks(backend: Backend, blocks, name, masked) -> None:
    codec = QUANTIZED[name]
    sizes = 10.0 ** torch.arange(blocks).remainder(9).sub(4).view(-1, 1)
    x = torch.randn(blocks, codec.width, generator=generator(name, blocks)) * sizes
    check_blocks(backend, codec, *tried(codec, x, masked))


@each("kind", KINDS, ("constant", "zeros"))
@loop_over("name,masked", MASKED)
def test_values_of_all_kinds(backend: Backend, kind, name, masked) -> None:
    codec = QUANTIZED[name]
    check_blocks(backend, codec, *tried(codec, rows_of(kind, 3, codec.width, torch.float32), masked))


@on()
@loop_over("name,masked", MASKED)
@loop_over("size", (1e-45, 1.4e-44, 2.6e-43, 3e-41, 1e-38, 3e35, 3e38))
def test_subnormal_and_large_values(backend: Backend, name, masked, size) -> None:
    codec = QUANTIZED[name]
    x = torch.linspace(-1, 1, codec.width).mul(size).expand(2, -1).contiguous()
    check_blocks(backend, codec, *tried(codec, x, masked))


@on()
@loop_over("name,masked", MASKED)
@loop_over("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_in_its_block_alone(backend: Backend, name, masked, value) -> None:
    codec = QUANTIZED[name]
    x, mask = tried(codec, torch.randn(3, codec.width, generator=generator(name)), masked)
    x[1, 7] = value  # not in the mask
    x[2, codec.width - 1] = value
    check_blocks(backend, codec, x, mask)
    decoded = backend.dequantize_blocks(backend.quantize_blocks(x, codec.bits, mask), 3, codec.bits, mask)
    assert decoded.isnan().sum(1).tolist() == [0, codec.width, codec.width]


@on()
@loop_over("name", ("int8", "int4"))
def test_halves_are_rounded_to_even(backend: Backend, name) -> None:
    """Of scale 1, every value is half way between two codes, but for the largest."""
    codec = QUANTIZED[name]
    most = 2 ** (codec.bits - 1) - 1
    x = (torch.arange(codec.width).remainder(2 * most) - most + 0.5).view(1, -1)
    x[0, 0] = most
    decoded = backend.dequantize_blocks(backend.quantize_blocks(x, codec.bits), 1, codec.bits)
    assert torch.equal(decoded, x.double().round().float())


@on()
@loop_over("name,masked", MASKED)
def test_values_that_are_not_aligned(backend: Backend, name, masked) -> None:
    codec = QUANTIZED[name]
    x, mask = tried(codec, torch.randn(5, codec.width, generator=generator(name)), masked)
    message = codec.encode(x, mask)
    assert same_bits(backend.having(offsets=(0, 1, 1)).quantize_blocks(x, codec.bits, mask), message)
    decoded = backend.having(offsets=(1, 0, 1)).dequantize_blocks(message, 5, codec.bits, mask)
    assert same_bits(decoded, codec.decode(message, 5, mask))


@on()
@loop_over("name", QUANTIZED)
def test_no_blocks(backend: Backend, name) -> None:
    codec = QUANTIZED[name]
    message = backend.quantize_blocks(torch.empty(0, codec.width), codec.bits)
    assert len(message) == 0
    assert backend.dequantize_blocks(message, 0, codec.bits).shape == (0, codec.width)


@on()
def test_other_numbers_of_bits_are_refused(backend: Backend) -> None:
    with pytest.raises(AssertionError, match="quantize_blocks returned"):
        backend.quantize_blocks(torch.ones(1, 256), 2)
