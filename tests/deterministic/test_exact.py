"""Exact sums, compared with fractions."""

import math
import random
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from gptlite.satellites.deterministic.check import MOST
from gptlite.satellites.deterministic.exact import (
    FINE,
    GRADIENT_UNIT,
    LOSS_UNIT,
    PIECE,
    SQUARE_BITS,
    SQUARE_WINDOWS,
    add,
    largest,
    limit_of,
    rounded,
    scale_of,
    square_of,
    square_sums,
)

NUMBERS = 60


def numbers(seed: int, count: int, low: int, high: int) -> Tensor:
    """[count], fp32, with signs and exponents of all sizes from 2^low up to 2^high."""
    random.seed(seed)
    found = [
        random.choice((-1, 1)) * random.uniform(0.5, 1) * 2.0 ** random.randint(low + 1, high) for _ in range(count)
    ]
    return torch.tensor(found)


def nearest(value: Fraction, unit: Fraction) -> Fraction:
    return round(value / unit) * unit  # ties to even


def summed(x: Tensor, unit: float) -> Tensor:
    """The windows [2, n] of the numbers x [terms, n]."""
    sums = torch.zeros(1, 2, x.shape[1], dtype=torch.float64)
    for row in x:
        add(sums, row[None], unit)
    return sums[0]


@pytest.mark.parametrize("unit", [GRADIENT_UNIT, LOSS_UNIT])
@pytest.mark.parametrize("seed", range(4))
def test_windows_hold_the_sums_of_the_rounded_numbers(unit: float, seed: int):
    exponent = int(math.log2(limit_of(unit, NUMBERS)))
    x = numbers(seed, NUMBERS * 50, exponent - 110, exponent).view(NUMBERS, 50)
    coarse, fine = Fraction(unit), Fraction(unit) * Fraction(FINE)
    sums = summed(x, unit)
    for column in range(x.shape[1]):
        terms = [Fraction(value) for value in x[:, column].tolist()]
        big = [nearest(term, coarse) for term in terms]
        small = [nearest(term - part, fine) for term, part in zip(terms, big, strict=True)]
        assert [Fraction(value) for value in sums[:, column].tolist()] == [sum(big), sum(small)]
        total = float(sum(big) + sum(small))  # rounded to fp64 once
        assert rounded(sums)[column].item() == torch.tensor(total, dtype=torch.float64).float().item()
        assert abs(sum(terms) - sum(big) - sum(small)) <= NUMBERS * fine / 2


@pytest.mark.parametrize("seed", range(4))
def test_order_and_split_into_ranks_change_no_bit(seed: int):
    x = numbers(seed, NUMBERS * 50, -60, 8).view(NUMBERS, 50)
    whole = summed(x, GRADIENT_UNIT)
    order = torch.randperm(NUMBERS, generator=torch.Generator().manual_seed(seed))
    assert summed(x[order], GRADIENT_UNIT).equal(whole)
    parts = [summed(part, GRADIENT_UNIT) for part in x[order].split([1, 20, 39])]
    assert (parts[2] + (parts[0] + parts[1])).equal(whole)
    assert not x[order].sum(0).equal(x.sum(0))  # which fp32 is sensitive to


def test_the_most_numbers_of_the_largest_size_stay_in_the_windows():
    """All numbers at the limit, and with the largest remainder, added as a sum of sums by doubling."""
    limit = limit_of(GRADIENT_UNIT, MOST)
    just = GRADIENT_UNIT * (2.0**19 + 0.5 - 2.0**-4)  # 24 bits, of which the last are below half a unit
    for value in (limit, just):
        sums = summed(torch.tensor([[value]]), GRADIENT_UNIT)
        for _ in range(int(math.log2(MOST))):
            sums = sums + sums
        assert sum(map(Fraction, sums.flatten().tolist())) == MOST * Fraction(value)
        odd = sums + summed(torch.tensor([[GRADIENT_UNIT * (1 + 2.0**-20)]]), GRADIENT_UNIT)  # at the last bit
        assert sum(map(Fraction, odd.flatten().tolist())) == MOST * Fraction(value) + Fraction(
            GRADIENT_UNIT * (1 + 2.0**-20)
        )
    with pytest.raises(ValueError, match=str(MOST)):
        limit_of(GRADIENT_UNIT, MOST + 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_makes_its_own_sum_nan(value: float):
    sums = summed(torch.tensor([[1.0, 2.0], [value, 3.0]]), GRADIENT_UNIT)
    assert rounded(sums).isfinite().tolist() == [False, True]
    assert rounded(sums)[1] == 5


def test_long_rows_are_added_in_pieces():
    x = numbers(0, 2 * (PIECE + 3), -40, 3).view(2, -1)
    sums = torch.zeros(2, 2, x.shape[1], dtype=torch.float64)
    add(sums, x, GRADIENT_UNIT)
    assert rounded(sums[0]).equal(x[0])
    assert rounded(sums[1]).equal(x[1])


@pytest.mark.parametrize("seed", range(4))
def test_squares_are_summed_exactly_down_to_the_last_unit(seed: int):
    x = numbers(seed, 500, -30, 10)
    scale = scale_of(largest([x], x.device))
    sums = square_sums([x[:200], x[200:].view(3, 100)], scale)
    halves = [square_sums([part], scale) for part in (x[250:], x[:250])]
    assert (halves[0] + halves[1]).equal(sums)
    true = sum(Fraction(value) ** 2 for value in x.tolist())
    units = [Fraction(2) ** (-SQUARE_BITS * window) for window in range(1, SQUARE_WINDOWS + 1)]
    held = sum(count * unit for count, unit in zip(sums.tolist(), units, strict=True)) * Fraction(scale.item()) ** 2
    assert abs(true - held) <= len(x) * units[-1] * Fraction(scale.item()) ** 2 / 2
    assert square_of(sums, scale).item() == pytest.approx(float(true), rel=1e-15)


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-45, 3e38, 1.0, 2.0])
def test_squares_of_any_size(size: float):
    x = torch.full((7,), size)
    scale = scale_of(largest([x, torch.zeros(0)], x.device))
    assert largest([x], x.device).item() <= scale.item()
    square = square_of(square_sums([x], scale), scale).item()
    assert square == pytest.approx(7 * x[0].double().item() ** 2, rel=1e-12)


def test_the_largest_of_nan_is_infinite():
    assert largest([torch.tensor([1.0, math.nan])], torch.device("cpu")).item() == math.inf
    assert largest([], torch.device("cpu")).item() == 0
