"""Fits a few constants of the hardware to published speeds, and tries a fit to half of the rows on the others.

A constant moves inside a range that physics or the measurements of others allow. Moving it away from the middle has a
price: with nearly as many constants as rows, a fit without one would learn the rows by heart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from gptlite.config.cluster import ClusterConfig
from plan.published.row import Row, value_of, with_key

PRICE = 0.02  # of moving a constant across its range, in squared relative error of one row
STEPS, SLOPE = 8, 0.02  # of the search, and the part of a range over which it takes a derivative
SEED = 6  # of the splits that are drawn
Point = np.ndarray[Any, Any]  # where each constant is in its range, from 0 to 1


@dataclass(frozen=True)
class Constant:
    """A key of ClusterConfig, the range it may take, and why.

    `times`: the range is that of a factor by which the cluster's value is multiplied, and `key` may name several keys.
    `stack`: how the stacks of the rows begin for which the constant holds.
    """

    key: str
    low: float
    high: float
    why: str
    times: bool = False
    stack: str | tuple[str, ...] = ""

    def at(self, place: float) -> float:
        """From 0 to 1 across the range, in equal ratios."""
        return self.low * (self.high / self.low) ** float(place)


_EFFICIENCY, _TILE = "matmul_efficiency.fp16", "low end: a GEMM that fills one tile of 128 x 256"
_MEMORY = "copies reach 0.9, norms and dropout 0.5 to 0.7"
A100_CONSTANTS = (
    Constant(_EFFICIENCY, 0.65, 0.88, "cuBLAS on large GEMMs: 200 to 275 of 312 TFLOP/s"),
    Constant("matmul_half_size", 32, 400, _TILE),
    Constant("memory_efficiency", 0.5, 0.9, _MEMORY),
    Constant("intra.efficiency", 0.5, 0.9, "bus bandwidth in nccl-tests: 150 to 270 of 300 GB/s"),
    Constant("inter.efficiency", 0.4, 0.95, "bus bandwidth in nccl-tests: 10 to 24 of 25 GB/s per GPU"),
)
V100_CONSTANTS = (
    Constant(_EFFICIENCY, 0.45, 0.85, "cuBLAS 10 on large GEMMs: 56 to 106 of 125 TFLOP/s"),
    Constant("matmul_half_size", 32, 400, _TILE),
    Constant("memory_efficiency", 0.5, 0.9, _MEMORY),
    Constant("intra.efficiency", 0.35, 0.9, "bus bandwidth in nccl-tests: 50 to 135 of 150 GB/s"),
    Constant("inter.efficiency", 0.3, 0.95, "bus bandwidth in nccl-tests: 2 to 6 of 6.25 GB/s per GPU"),
    Constant("unaligned_share", 0.08, 0.3, "without tensor cores: at most 31.4 of 125 TFLOP/s"),
)


@dataclass(frozen=True)
class Split:
    """One half of the rows that a fit has seen, and the largest error of the others."""

    fitted_to: tuple[str, ...]
    largest: float


def fit(rows: Sequence[Row], constants: Sequence[Constant], price: float = PRICE) -> ClusterConfig:
    """The constants that bring the counted rows closest, by least squares of their errors and the price of moving."""
    return moved(rows[0].sheet(), constants, fit_point(rows, constants, price))


def fit_point(rows: Sequence[Row], constants: Sequence[Constant], price: float = PRICE) -> Point:
    """The places of the constants that `fit` finds. Rows may be of several clusters and stacks."""
    counted = [row for row in rows if row.counted]

    def off(point: Point) -> Point:
        errors = (row.error(moved(row.sheet(), constants, point, row.stack)) for row in counted)
        return np.array([*errors, *(price**0.5 * (point - 0.5))])

    return _least_squares(off, np.full(len(constants), 0.5))


def cross_validation(rows: Sequence[Row], constants: Sequence[Constant], most: int | None = None) -> list[Split]:
    """Fits to half of the counted rows and predicts the others, for every split or `most` of them drawn by SEED."""
    counted = [row for row in rows if row.counted]
    splits = list(combinations(counted, (len(counted) + 1) // 2))
    if most is not None and most < len(splits):
        splits = random.Random(SEED).sample(splits, most)
    results = []
    for chosen in splits:
        cluster = fit(chosen, constants)
        largest = max(abs(row.error(cluster)) for row in counted if row not in chosen)
        results.append(Split(tuple(row.name for row in chosen), largest))
    return results


def moved(cluster: ClusterConfig, constants: Sequence[Constant], point: Point, stack: str = "") -> ClusterConfig:
    """The cluster with each constant of a row of `stack` at its place."""
    for constant, place in zip(constants, point, strict=True):
        for key in constant.key.split() if stack.startswith(constant.stack) else ():
            if _has(cluster, key):
                before = value_of(cluster, key) if constant.times else 1.0
                cluster = with_key(cluster, key, before * constant.at(place))
    return cluster


def _has(cluster: ClusterConfig, key: str) -> bool:
    """Whether a cluster has a value for a key; a dtype may be missing."""
    name, _, inner = key.partition(".")
    values = getattr(cluster, name)
    return not isinstance(values, dict) or inner in values


def _least_squares(off: Callable[[Point], Point], start: Point) -> Point:
    """Gauss and Newton's steps in the unit cube; a step that does not help is halved. The best point found."""
    point, here = start, off(start)
    for _ in range(STEPS):
        ways = np.where(point < 0.5, SLOPE, -SLOPE)
        slopes = np.stack([(off(point + way) - here) / way.sum() for way in np.diag(ways)], axis=1)
        step = _step(slopes, here, point)
        for _ in range(4):
            tried = np.clip(point + step, 0, 1)
            there = off(tried)
            if there @ there < here @ here:
                break
            step = step / 2
        else:
            return point
        point, here = tried, there
    return point


def _step(slopes: Point, here: Point, point: Point) -> Point:
    """To the minimum of the squares as if they were of planes; what would leave the cube stops at its wall."""
    step, free = np.zeros_like(point), np.ones(len(point), bool)
    while free.any():
        step[free] = np.linalg.lstsq(slopes[:, free], -here - slopes[:, ~free] @ step[~free], rcond=None)[0]
        outside = free & ((point + step < 0) | (point + step > 1))
        if not outside.any():
            break
        step[outside] = np.clip((point + step)[outside], 0, 1) - point[outside]
        free &= ~outside
    return step
