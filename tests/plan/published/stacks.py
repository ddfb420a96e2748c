"""Code bases whose kernels differ from those that the presets of `conf/cluster/` describe, and factors for them.

A stack's factors multiply a preset's values, or set keys that are 0 in a preset. They are fitted to the rows named in
`mpt.py` and `titan.py`, by least squares with the price that `fit.py` explains, and hold for every row of the stack.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from gptlite.config.cluster import ClusterConfig
from plan.published import megatron, mpt, titan
from plan.published.fit import Constant, fit_point, moved
from plan.published.row import Row

PRODUCTS = "matmul_efficiency.bf16 matmul_efficiency.fp8"
_ATTENTION = "FlashAttention 1 in Triton to FlashAttention-2"
_SEPARATE = "separate ops move 1 to 3.5 times the bytes of fused ones"
# Stacks that were measured on clouds and on a university's cluster, not on one that its vendor had tuned.
SHARED = (mpt.STACK, "torchtitan", megatron.BLOOM)
FACTORS = (
    Constant(PRODUCTS, 0.7, 1.1, "cuBLAS at the clocks of a whole step", True, mpt.STACK),
    Constant("attention_efficiency", 0.4, 1.2, _ATTENTION, True, f"{mpt.STACK}, A100"),
    Constant("attention_efficiency", 0.4, 1.2, _ATTENTION, True, f"{mpt.STACK}, H100"),
    Constant("unfused", 1.0, 3.5, _SEPARATE, stack=mpt.STACK),
    Constant("overlap", 0.5, 0.9, "gathers are limited to two at a time", stack=mpt.STACK),
    Constant(PRODUCTS, 0.8, 1.1, "cuBLAS at the clocks of a whole step", True, "torchtitan"),
    Constant("attention_efficiency", 0.7, 1.4, _ATTENTION, True, "torchtitan"),
    Constant("unfused", 1.0, 3.5, _SEPARATE, stack=titan.EAGER),
    Constant("unfused", 0.7, 1.4, "inductor's fused kernels: about as ours", stack=titan.COMPILED),
    Constant(
        "straggle", 0.002, 0.03, "of n ranks whose steps differ by 1%, the slowest takes 1 to 3% longer", stack=SHARED
    ),
    Constant(
        "inter.congestion",
        0.02,
        0.5,
        "bus bandwidth in nccl-tests: 1 to 4 times less on 64 nodes than on 2",
        stack=SHARED,
    ),
)


def fitted_rows() -> list[Row]:
    """The rows to which the factors are fitted."""
    return [*mpt.fitted_rows(), *titan.fitted_rows()]


@cache
def places() -> tuple[float, ...]:
    """The places of the factors in their ranges."""
    return tuple(fit_point(fitted_rows(), FACTORS).tolist())


def fitted_cluster(row: Row) -> ClusterConfig:
    """The cluster of a row with its stack's factors."""
    return moved(row.sheet(), FACTORS, np.array(places()), row.stack)
