"""Fitting a few constants of the hardware to published speeds, and how well what was fitted to half predicts the rest.

A constant moves inside a range that physics or measurements of others allow, and the further from its middle the
dearer: with nearly as many constants as rows a fit without that price would only learn the rows by heart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from gptlite.plan.config import ClusterConfig
from gptlite.plan.published import error
from gptlite.plan.published_rows import Row

PRICE = 0.02  # of moving a constant across its range, in squared relative error of one row
FIRST_STEP, LAST_STEP = 0.16, 0.004  # of a range
SEED, STARTS = 6, 2


@dataclass(frozen=True)
class Constant:
    """A key of ClusterConfig, the range it may take, and why."""

    key: str
    low: float
    high: float
    why: str


_FP16 = "matmul_efficiency.fp16"
MEGATRON_CONSTANTS = (
    Constant(_FP16, 0.65, 0.88, "cuBLAS on large products, 200 to 275 of 312 TFLOP/s"),
    Constant("matmul_half_size", 32, 400, "a tile of 128 x 256 filled once at the low end"),
    Constant("memory_efficiency", 0.6, 0.95, "a copy reaches 0.9, a reduction less"),
    Constant("intra.efficiency", 0.5, 0.9, "nccl-tests' bus bandwidth, 150 to 270 of 300 GB/s"),
    Constant("inter.efficiency", 0.4, 0.95, "nccl-tests' bus bandwidth, 10 to 24 of 25 GB/s a GPU"),
)
DEEPSPEED_CONSTANTS = (
    Constant(_FP16, 0.45, 0.85, "cuBLAS 10 on large products, 56 to 106 of 125 TFLOP/s"),
    Constant("matmul_half_size", 32, 400, "a tile of 128 x 256 filled once at the low end"),
    Constant("memory_efficiency", 0.5, 0.95, "a copy reaches 0.9, a reduction less"),
    Constant("intra.efficiency", 0.35, 0.9, "nccl-tests' bus bandwidth, 50 to 135 of 150 GB/s"),
    Constant("inter.efficiency", 0.3, 0.95, "nccl-tests' bus bandwidth, 2 to 6 of 6.25 GB/s a GPU"),
    Constant("unaligned_share", 0.08, 0.3, "CUDA cores: 31.4 of 125 TFLOP/s at most"),
)
CONSTANTS = {"megatron": MEGATRON_CONSTANTS, "deepspeed": DEEPSPEED_CONSTANTS}


@dataclass(frozen=True)
class Fit:
    """What a fit has found: a value a constant, and the cluster with them."""

    values: tuple[float, ...]
    cluster: ClusterConfig


@dataclass(frozen=True)
class Split:
    """One half of the rows that a fit has seen, and the largest and mean error of the others."""

    fitted_to: tuple[str, ...]
    largest: float
    mean: float


def fit(
    rows: Sequence[Row],
    cluster: ClusterConfig,
    constants: Sequence[Constant],
    starts: int = STARTS,
    price: float = PRICE,
) -> Fit:
    """The constants that bring the rows closest, by least squares of the relative error and the price of moving."""
    counted = [row for row in rows if row.counted]
    middle = [0.5] * len(constants)

    def cost(point: Sequence[float]) -> float:
        tried = _moved(cluster, constants, point)
        moved = sum((a - b) ** 2 for a, b in zip(point, middle, strict=True))
        return sum(error(row, tried) ** 2 for row in counted) + price * moved

    draw = random.Random(SEED)
    points = [middle, *([draw.random() for _ in constants] for _ in range(starts - 1))]
    best = min((_search(cost, point) for point in points), key=cost)
    return Fit(tuple(_value(c, p) for c, p in zip(constants, best, strict=True)), _moved(cluster, constants, best))


def cross_validation(
    rows: Sequence[Row], cluster: ClusterConfig, constants: Sequence[Constant], most: int | None = None
) -> list[Split]:
    """Fits to half of the counted rows and predicts the others, for every split or `most` of them drawn by SEED."""
    counted = [row for row in rows if row.counted]
    splits = list(combinations(range(len(counted)), (len(counted) + 1) // 2))
    if most is not None and most < len(splits):
        splits = random.Random(SEED).sample(splits, most)
    results = []
    for chosen in splits:
        found = fit([counted[index] for index in chosen], cluster, constants, starts=1)
        errors = [abs(error(row, found.cluster)) for index, row in enumerate(counted) if index not in chosen]
        names = tuple(counted[index].name for index in chosen)
        results.append(Split(names, max(errors), sum(errors) / len(errors)))
    return results


def value_of(cluster: ClusterConfig, key: str) -> float:
    """The number behind a dotted key."""
    found: Any = cluster
    for part in key.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    return found


def _moved(cluster: ClusterConfig, constants: Sequence[Constant], point: Sequence[float]) -> ClusterConfig:
    for constant, place in zip(constants, point, strict=True):
        cluster = _set(cluster, constant.key, _value(constant, place))
    return cluster


def _set(cluster: ClusterConfig, key: str, value: float) -> ClusterConfig:
    name, _, inner = key.partition(".")
    old = getattr(cluster, name)
    if isinstance(old, dict):
        return replace(cluster, **{name: old | {inner: value}})
    return replace(cluster, **{name: replace(old, **{inner: value}) if inner else value})


def _value(constant: Constant, place: float) -> float:
    """From 0 to 1 across the range, in equal ratios."""
    return constant.low * (constant.high / constant.low) ** place


def _place(constant: Constant, value: float) -> float:
    from math import log

    return log(value / constant.low) / log(constant.high / constant.low)


def _search(cost: Callable[[Sequence[float]], float], start: Sequence[float]) -> list[float]:
    """Hooke and Jeeves' pattern search in the unit cube: a step along each axis that helps, then the same way again."""
    best, least, step = list(start), cost(start), FIRST_STEP
    while step >= LAST_STEP:
        tried, found = _explored(cost, best, least, step)
        if found < least - 1e-12:
            ahead = [min(1.0, max(0.0, 2 * new - old)) for new, old in zip(tried, best, strict=True)]
            best, least = tried, found
            if (further := cost(ahead)) < least:
                best, least = ahead, further
        else:
            step /= 2
    return best


def _explored(
    cost: Callable[[Sequence[float]], float], start: list[float], least: float, step: float
) -> tuple[list[float], float]:
    point = list(start)
    for axis in range(len(point)):
        for change in (step, -step):
            tried = [*point]
            tried[axis] = min(1.0, max(0.0, point[axis] + change))
            if (found := cost(tried)) < least:
                point, least = tried, found
                break
    return point, least
