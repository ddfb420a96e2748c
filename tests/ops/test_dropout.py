"""Masks that are a function of where an element stands; Philox against Random123's published vectors."""

import math

import pytest
import torch

from gptlite.ops.dropout import DropoutKey, dropout, keep_mask
from gptlite.ops.philox import philox

# Random123 kat_vectors, philox4x32 10: counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
SHAPES = {"residual": (6, 10, 12), "attention": (6, 3, 10, 10)}


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, output):
    tensors = [torch.tensor([word]) for word in words(counter)]
    assert [int(word) for word in philox(tuple(tensors), tuple(words(key)))] == words(output)


def test_philox_broadcasts_its_counter():
    axes = [torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate((2, 3, 4, 5))]
    grid = torch.stack([word.expand(2, 3, 4, 5) for word in philox(tuple(axes), (7, 8))])
    one = philox(tuple(torch.tensor(i) for i in (1, 2, 3, 4)), (7, 8))
    assert torch.equal(grid[:, 1, 2, 3, 4], torch.stack(one))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_sample_has_its_mask_in_any_batch(shape):
    samples = ids(3, 1, 2**32 + 3, 9, 0, 2**40)
    mask = keep_mask(shape, 0.5, DropoutKey(1, 2, samples))
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    assert torch.equal(keep_mask(shape, 0.5, DropoutKey(1, 2, samples[order])), mask[order])
    for cut in (1, 2, 3):
        parts = [keep_mask((len(part), *shape[1:]), 0.5, DropoutKey(1, 2, part)) for part in samples.split(cut)]
        assert torch.equal(torch.cat(parts), mask)
    assert len({bytes(row.flatten().tolist()) for row in mask}) == len(mask)  # samples 3 and 2**32 + 3 differ too


@pytest.mark.parametrize("width", [1, 3, 4, 5, 13])
def test_width_and_length_only_cut_the_mask(width):
    key = DropoutKey(1, 2, ids(5))
    whole = keep_mask((1, 2, 9, 16), 0.5, key)
    assert torch.equal(keep_mask((1, 2, 4, width), 0.5, key), whole[:, :, :4, :width])


@pytest.mark.parametrize("shape", [(2, 24, 12), (2, 3, 24, 10)], ids=["residual", "attention"])
def test_two_runs_of_positions_have_the_masks_of_those_positions(shape):
    whole = keep_mask(shape, 0.5, DropoutKey(1, 2, ids(5, 6)))
    piece = (*shape[:-2], 8, shape[-1])
    key = DropoutKey(1, 2, ids(5, 6), first_position=3, gap=9)  # positions 3 to 6 and 16 to 19
    assert torch.equal(keep_mask(piece, 0.5, key), torch.cat([whole[..., 3:7, :], whole[..., 16:20, :]], -2))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_of_dropped_elements_is_the_rate(p):
    mask = keep_mask((8, 4, 64, 64), p, DropoutKey(0, 1, torch.arange(8)))
    n = mask.numel()
    for part, count in ((mask, n), (mask[3], n // 8), (mask[:, 2], n // 4), (mask[..., 1::4], n // 4)):
        dropped = count - int(part.sum())
        assert abs(dropped - count * p) < 5 * math.sqrt(count * p * (1 - p))


def test_seeds_sites_samples_heads_and_positions_are_independent():
    def draw(seed, site, sample):
        return keep_mask((1, 2, 64, 64), 0.5, DropoutKey(seed, site, ids(sample)))[0].double()

    base = draw(0, 1, 0)
    others = [draw(1, 1, 0)[0], draw(0, 2, 0)[0], draw(0, 1, 1)[0], base[1], base[0].roll(1, 0), base[0].roll(1, 1)]
    for other in others:
        agreement = (base[0] == other).double().mean()
        assert abs(agreement - 0.5) < 5 * 0.5 / 64  # 64 = sqrt(elements)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_kept_elements_and_gradients_are_scaled(shape, dtype):
    key = DropoutKey(0, 0, torch.arange(shape[0]))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    out = dropout(x, 0.25, key)
    out.backward(torch.ones_like(out))
    mask = keep_mask(shape, 0.25, key)
    assert out.dtype == dtype
    torch.testing.assert_close(out, x.detach() * mask / 0.75)
    torch.testing.assert_close(x.grad, (mask / 0.75).to(dtype))


def test_dropped_elements_are_zero_even_where_x_is_not_finite():
    x = torch.full((1, 8, 8), float("inf"))
    out = dropout(x, 0.5, DropoutKey(0, 0, ids(0)))
    assert set(out.unique().tolist()) == {0.0, float("inf")}


def test_without_a_rate_or_a_key_the_input_is_returned():
    x = torch.randn(2, 3, 4)
    assert dropout(x, 0.0, DropoutKey(0, 0, ids(0, 1))) is x
    assert dropout(x, 0.5, None) is x
