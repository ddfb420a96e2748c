"""Numbers that describe a tensor, and how far two are apart."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 1 << 24  # elements converted to fp64 at a time


def statistics(tensor: Tensor) -> dict[str, float | int | None]:
    """Elements, least, largest, mean, standard deviation, norm, zeros, and how many are not finite.

    The others are of the finite elements, in fp64; None where there are none.
    """

    def finite() -> Iterator[Tensor]:
        for (block,) in _blocks(tensor):
            if (kept := block[block.isfinite()]).numel():
                yield kept

    numbers: dict[str, float | None] = dict.fromkeys(("min", "max", "mean", "std", "norm"))
    if count := sum(map(torch.numel, finite())):
        mean = sum(float(block.sum()) for block in finite()) / count
        numbers = {
            "min": min(float(block.min()) for block in finite()),
            "max": max(float(block.max()) for block in finite()),
            "mean": mean,
            "std": (sum(float((block - mean).square().sum()) for block in finite()) / count) ** 0.5,
            "norm": sum(float(block.square().sum()) for block in finite()) ** 0.5,
        }
    return {
        "elements": tensor.numel(),
        **numbers,
        "zero": sum(int((block == 0).sum()) for (block,) in _blocks(tensor)),
        "nan": sum(int(block.isnan().sum()) for (block,) in _blocks(tensor)),
        "inf": sum(int(block.isinf().sum()) for (block,) in _blocks(tensor)),
    }


@dataclass(frozen=True)
class Distance:
    """How far two tensors are apart: elements that differ, the largest |a - b|, and |a - b| / |a| by norms."""

    differing: int
    largest: float
    relative: float


def distance(a: Tensor, b: Tensor) -> Distance:
    """Of two tensors of one shape. Equal NaNs are equal; where one alone is NaN, they are infinitely apart."""
    differing, largest, apart, norm = 0, 0.0, 0.0, 0.0
    for x, y in _blocks(a, b):
        same = (x == y) | (x.isnan() & y.isnan())
        differing += int((~same).sum())
        gap = (x - y).abs().masked_fill(same, 0).nan_to_num(nan=float("inf"), posinf=float("inf"))
        if gap.numel():
            largest = max(largest, float(gap.max()))
        apart += float(gap.square().sum())
        norm += float(x[x.isfinite()].square().sum())
    relative = 0.0 if not apart else (apart / norm) ** 0.5 if norm else float("inf")
    return Distance(differing, largest, relative)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    flat = [tensor.reshape(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), BLOCK):
        yield tuple(each[start : start + BLOCK].to(torch.float64) for each in flat)
