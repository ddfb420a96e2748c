"""Buckets as aligned blocks."""

import pytest
import torch

from gptlite.satellites.compressed.blocks import BlockLayout
from gptlite.satellites.compressed.codecs import CODECS, Codec

SIZES = (5, 256, 0, 257, 700)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("multiple", [1, 4, 7])
def test_unpack_reverts_pack_and_padding_is_zero(rows: int, multiple: int):
    layout = BlockLayout(SIZES, 256, rows, multiple)
    flat = torch.randn(rows, sum(SIZES))
    aligned = layout.pack(flat)
    assert layout.starts == (0, 256, 512, 512, 1024)
    assert layout.blocks == {1: 7, 4: 8, 7: 7}[multiple]
    assert aligned.shape == (rows, layout.blocks, 256)
    assert torch.equal(layout.unpack(aligned), flat)
    mask = layout.mask(flat.device)
    assert mask.sum() == flat.numel()
    assert torch.equal(aligned[mask].view(rows, -1), flat)
    assert not aligned[~mask].any()
    again = layout.pack(flat * 2, out=aligned)
    assert again is aligned
    assert torch.equal(layout.unpack(aligned), flat * 2)


def test_views_write_into_the_buffer():
    layout = BlockLayout(SIZES, 256, 2)
    aligned = layout.new(torch.device("cpu"))
    views = layout.views(aligned)
    assert [view.shape for view in views] == [(2, size) for size in SIZES]
    for number, view in enumerate(views, 1):
        view.fill_(number)
    expected = torch.cat([torch.full((size,), float(number)) for number, size in enumerate(SIZES, 1)])
    assert torch.equal(layout.unpack(aligned), expected.expand(2, -1))


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_parameter_is_encoded_to_the_same_bits_beside_any_others(codec: Codec):
    """As a replicated parameter is on tensor ranks, whose other parameters have other values and sizes."""
    shared, decoded = torch.randn(1, 300), []
    for before, after in ((700, 3), (1, 1500)):
        layout = BlockLayout((before, 300, after), codec.width)
        x = layout.pack(torch.cat([torch.randn(1, before), shared, torch.randn(1, after)], dim=1))[0]
        mask = layout.mask(x.device)[0]
        decoded.append(layout.views(codec.decode(codec.encode(x, mask), len(x), mask)[None])[1])
    assert torch.equal(*decoded)
