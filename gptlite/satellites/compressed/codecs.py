"""Codecs of fp32 blocks: bf16, int8, int4 and signs.

A codec takes x [blocks, width], fp32, and returns a message, a vector of bytes whose length depends on the number of
blocks alone. A message of int8, int4 or signs has the blocks' scales first, in fp32, then the codes of each block.

Zeros become zeros. If a value of a block is not finite, all of the block's values are NaN after decoding, except that
bf16 keeps each value apart and infinities as they are. Nothing that is not finite becomes finite. bf16 rounds values
next to the largest one of fp32 to infinity, and signs become NaN where the sum of a block's |x| overflows.

`gptlite::quantize_blocks` and `gptlite::dequantize_blocks` are the same functions as kernels, with the same bits.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

SCALE_BYTES = 4


class Codec(Protocol):
    """Codec of blocks of `width` values, `bits` each without scales."""

    @property
    def name(self) -> str: ...
    @property
    def width(self) -> int: ...

    def message_bytes(self, blocks: int) -> int:
        """Return the length of the message of so many blocks."""
        ...

    def encode(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the message, uint8 [message_bytes(blocks)], of x [blocks, width], fp32.

        `mask`: bool [blocks, width], False for values that are always zero, such as padding. None: there are none.
        """
        ...

    def decode(self, message: Tensor, blocks: int, mask: Tensor | None = None) -> Tensor:
        """Return values [blocks, width], fp32. `mask` must be that of `encode`."""
        ...


@dataclass(frozen=True)
class Bf16:
    """bf16, rounded to nearest even, without blocks of its own: `width` is only that of the others."""

    name: str = "bf16"
    width: int = 256

    def message_bytes(self, blocks: int) -> int:
        """Return the length of the message of so many blocks."""
        return blocks * self.width * 2

    def encode(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the message of x [blocks, width]. `mask` makes no difference: zeros stay zeros."""
        return x.to(torch.bfloat16).view(-1).view(torch.uint8)

    def decode(self, message: Tensor, blocks: int, mask: Tensor | None = None) -> Tensor:
        """Return values [blocks, width], fp32."""
        return message.view(torch.bfloat16).float().view(blocks, self.width)


@dataclass(frozen=True)
class Quantized:
    """Codes of 8 bits, of 4 bits, or of 1 bit, with an fp32 scale per block.

    `bits` = 8 or 4: symmetric integers, code = x / scale rounded to nearest even with scale = max |x| / 127 or 7. A
    block of zeros, or of values so small that the scale underflows, becomes zeros.

    `bits` = 1: signs, s·sign(x) with s = |x|_1 / n, the mean of |x| over the n values that `mask` does not exclude;
    sign(0) is +1, and excluded values become 0. This scale minimizes |x − s·sign(x)|², which is then |x|² − |x|_1² / n.
    So the error is smaller than x for every x but 0, as error feedback needs. 1-bit Adam (arXiv:2102.02888) has
    s = |x|_2 / √n, which keeps the length, with an error of 2|x|² − 2|x|_1·|x|_2 / √n. That exceeds |x|² where
    |x|_1 < √n·|x|_2 / 2: if a few values are much larger than the others, the errors then grow.

    A byte holds the codes of values i, i + width·bits / 8, ... of its block, the first in its lowest bits. `fused`: by
    our kernels, which must be loaded.
    """

    name: str
    bits: int
    width: int
    fused: bool = False

    def message_bytes(self, blocks: int) -> int:
        """Return the length of the message of so many blocks."""
        return blocks * (SCALE_BYTES + self.width * self.bits // 8)

    def encode(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the message of x [blocks, width]. `mask` (bool, like x) matters to signs alone."""
        if self.fused:
            return torch.ops.gptlite.quantize_blocks(x, mask if self.bits == 1 else None, self.bits)
        scales, codes = _signs(x, mask) if self.bits == 1 else _integers(x, 2 ** (self.bits - 1) - 1)
        return torch.cat([scales.view(-1).view(torch.uint8), _packed(codes, self.bits).view(-1)])

    def decode(self, message: Tensor, blocks: int, mask: Tensor | None = None) -> Tensor:
        """Return values [blocks, width], fp32."""
        if self.fused:
            return torch.ops.gptlite.dequantize_blocks(message, mask if self.bits == 1 else None, blocks, self.bits)
        scales = message[: blocks * SCALE_BYTES].view(torch.float32).view(blocks, 1)
        codes = _unpacked(message[blocks * SCALE_BYTES :].view(blocks, self.width * self.bits // 8), self.bits)
        if self.bits > 1:
            return codes.float() * scales
        signs = 1.0 - 2.0 * codes.float()
        return (signs if mask is None else torch.where(mask, signs, 0.0)) * scales  # 0 · NaN is NaN


CODECS: dict[str, Codec] = {
    "bf16": Bf16(),
    "int8": Quantized("int8", 8, 256),
    "int4": Quantized("int4", 4, 256),
    "sign": Quantized("sign", 1, 1024),
}


def codec_of(name: str, fused: bool) -> Codec:
    """Return a codec of CODECS. `fused`: with our kernels, which must be loaded; the messages are the same."""
    codec = CODECS[name]
    return replace(codec, fused=True) if fused and isinstance(codec, Quantized) else codec


def _integers(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return scales [blocks, 1] and codes [blocks, width], int8, from -most to most."""
    scales = _finite(x.abs().amax(-1, keepdim=True) / most)
    codes = (x / scales).clamp(-most, most).round()
    return scales, torch.where(scales > 0, codes, 0.0).to(torch.int8)


def _signs(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return scales [blocks, 1] and codes [blocks, width], int8: 1 for negative values, else 0."""
    # x · 0 is 0 for values that ought to be zero, and NaN for those that are not finite.
    sums = x.abs() if mask is None else torch.where(mask, x.abs(), x * 0.0)
    while sums.shape[-1] > 1:  # by halves: an order of additions that a kernel can have too
        first, second = sums.chunk(2, -1)
        sums = first + second
    counts = x.shape[-1] if mask is None else mask.sum(-1, keepdim=True).clamp(min=1).float()
    negative = x < 0 if mask is None else (x < 0) & mask
    return _finite(sums / counts), negative.to(torch.int8)


def _finite(scales: Tensor) -> Tensor:
    """Return the scales with one NaN in place of infinity and any NaN, so that 0 · scale and code · scale are NaN."""
    return torch.where(scales.isfinite(), scales, torch.nan)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Return bytes [blocks, width · bits / 8] of codes [blocks, width] of `bits` bits each."""
    parts = (codes.view(torch.uint8) & (2**bits - 1)).chunk(8 // bits, -1)
    packed = parts[0]
    for place, part in enumerate(parts[1:], 1):
        packed = packed | (part << (place * bits))
    return packed


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return codes [blocks, width], int8: signed ones, or of one bit 0 and 1."""
    if bits == 8:
        return packed.view(torch.int8)
    parts = [packed >> (place * bits) & (2**bits - 1) for place in range(8 // bits)]
    codes = torch.cat(parts, -1).view(torch.int8)
    return codes if bits == 1 else (codes ^ 8) - 8  # two's complement
