"""Statistics of a tensor, and distances between two tensors."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gptlite.progress import counted

BLOCK = 1 << 24  # elements converted to fp64 at a time


def statistics(tensor: Tensor) -> dict[str, float | int | None]:
    """Return the numbers of all, zero, NaN and infinite elements, and min, max, mean, standard deviation and 2-norm.

    The last five are computed over the finite elements, in fp64; they are None if no element is finite.
    """
    count = zeros = nan = infinite = 0
    total = squares = 0.0
    low, high = float("inf"), float("-inf")
    for (block,) in _blocks(tensor):
        finite = block[block.isfinite()]
        nan += int(block.isnan().sum())
        infinite += int(block.isinf().sum())
        zeros += int((block == 0).sum())
        count += finite.numel()
        total += float(finite.sum())
        squares += float(finite.square().sum())
        if finite.numel():
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    mean = total / count if count else None
    spread = None
    if mean is not None:
        deviations = (float((b[b.isfinite()] - mean).square().sum()) for (b,) in _blocks(tensor))
        spread = (sum(deviations) / count) ** 0.5
    return {
        "elements": tensor.numel(),
        "min": low if count else None,
        "max": high if count else None,
        "mean": mean,
        "std": spread,
        "norm": squares**0.5 if count else None,
        "zero": zeros,
        "nan": nan,
        "inf": infinite,
    }


@dataclass(frozen=True)
class Distance:
    """Distance between two tensors: number of elements that differ, maximum of |a - b|, and norm(a - b) / norm(a)."""

    differing: int
    largest: float
    relative: float


def distance(a: Tensor, b: Tensor) -> Distance:
    """Return the distance between two tensors of equal shape.

    Two NaNs count as equal; a NaN in only one of the tensors counts as an infinite difference.
    """
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


def not_finite(tensor: Tensor) -> str:
    """Return e.g. `has 3 NaN or infinite elements, the first at [0, 7]`, or an empty string if all are finite."""
    if tensor.isfinite().all():
        return ""
    places = (~tensor.isfinite()).nonzero()
    return f"has {counted(len(places), 'NaN or infinite element')}, the first at {places[0].tolist()}"
