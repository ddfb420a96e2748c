"""Exact sums of fp32 numbers, in two windows of fixed-point numbers that fp64 holds.

    x = a + b + rest,  a a multiple of `unit`,  b a multiple of `unit` 2⁻³³,  |rest| <= `unit` 2⁻³⁴

a and b are rounded to the nearest multiple. fp64 adds multiples of a unit exactly as long as their sum stays below 2⁵³
units, so the sums of all a and of all b do not depend on the order of the additions, nor on the split into ranks. The
two sums are added and rounded to fp32 once, at the end. This is a pre-rounded sum (Demmel and Nguyen 2013, Fast
Reproducible Floating-Point Summation, section 4) with windows that are fixed, so that no pass over the data has to find
the largest number first.

A sum of n numbers has the error of n roundings of `unit` 2⁻³⁴ at most, and of its own rounding to fp32. With n <= MOST
numbers, the sum of all b, each up to half a unit of a, stays in its window. So does that of all a if no number is above
`limit_of(unit, n)`.
"""

import torch
from torch import Tensor

from gptlite.satellites.deterministic.check import MOST

GRADIENT_UNIT = 2.0**-37  # means over a batch whose elements stay below 2¹⁴; those above 2⁻⁴⁶ keep 24 bits
LOSS_UNIT = 2.0**-20  # mean losses below 2³¹
FINE = 2.0**-33  # unit of b in units of a
PIECE = 2**16  # elements that a CPU splits at a time, so that the temporaries stay in its cache
SHIFT = 1.5 * 2.0**52  # adding and subtracting SHIFT units rounds to a multiple, as their sum has fp64's last bit there


def limit_of(unit: float, numbers: int) -> float:
    """Return the largest absolute value of a number in a sum of up to `numbers`. Raises ValueError above MOST."""
    if numbers > MOST:
        raise ValueError(f"a sum of {numbers} numbers may leave its window; at most {MOST} can be added")
    return unit * 2.0**51 / (1 << (numbers - 1).bit_length())


def add(sums: Tensor, x: Tensor, unit: float) -> None:
    """Add the numbers x [rows, n], fp32, to their `sums` [rows, 2, n], fp64, in place. An x that is not finite makes
    its sum NaN."""
    fine = unit * FINE
    for row, into in zip(x.unbind(), sums.unbind(), strict=True):
        size = PIECE if x.device.type == "cpu" else max(1, row.numel())
        for piece, coarse, rest in zip(row.split(size), into[0].split(size), into[1].split(size), strict=True):
            left = piece.double()
            a = (left + SHIFT * unit).sub_(SHIFT * unit)
            left.sub_(a)
            coarse.add_(a)
            rest.add_(left.add_(SHIFT * fine).sub_(SHIFT * fine))


def rounded(sums: Tensor) -> Tensor:
    """Return the numbers [n], fp32, of complete `sums` [2, n]."""
    return sums.sum(0).float()


SQUARE_BITS = 21  # of each of the windows below, so that int64 adds 2⁴² squares
SQUARE_WINDOWS = 3


def largest(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the largest absolute value of all elements, fp64 []; inf if an element is not finite, 0 without any."""
    found = [tensor.abs().amax().double().to(device) for tensor in tensors if tensor.numel()]
    most = torch.stack(found).amax() if found else torch.zeros((), dtype=torch.float64, device=device)
    return most.nan_to_num(nan=torch.inf, posinf=torch.inf)


def scale_of(most: Tensor) -> Tensor:
    """Return the power of two that divides numbers up to `most` to at most 1, fp64 []; 1 for 0."""
    mantissa, exponent = torch.frexp(most)
    return torch.ldexp(torch.ones_like(most), torch.where(mantissa == 0, 0, exponent))


def square_sums(tensors: list[Tensor], scale: Tensor) -> Tensor:
    """Return the sum of the squares of all elements over `scale`, as int64 [SQUARE_WINDOWS]: multiples of 2 to the
    powers of -SQUARE_BITS, -2 SQUARE_BITS and so on. No absolute value may exceed `scale`.

    The square of an fp32 number is exact in fp64. What is left below the last unit, 2⁻⁶³, is dropped.
    """
    sums = torch.zeros(SQUARE_WINDOWS, dtype=torch.int64, device=scale.device)
    for tensor in tensors:
        flat = tensor.detach().flatten()
        for piece in flat.split(PIECE if flat.device.type == "cpu" else 2**26):  # 2²⁶ windows add up to 2⁴⁷ units
            square = piece.double().div_(scale.to(piece.device)).square_()
            parts = []
            for window in range(1, SQUARE_WINDOWS + 1):
                shift = SHIFT * 2.0 ** (-SQUARE_BITS * window)
                part = (square + shift).sub_(shift)
                square.sub_(part)
                parts.append(part.sum() * 2.0 ** (SQUARE_BITS * window))
            sums += torch.stack(parts).long().to(sums.device)
    return sums


def square_of(sums: Tensor, scale: Tensor) -> Tensor:
    """Return the sum of squares, fp64 [], of the complete `square_sums` of all ranks."""
    units = torch.tensor([2.0 ** (-SQUARE_BITS * window) for window in range(1, SQUARE_WINDOWS + 1)])
    parts = sums.double() * units.to(sums.device, torch.float64)
    return (parts[0] + (parts[1] + parts[2])) * scale.square()
